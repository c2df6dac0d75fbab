#!/usr/bin/python3
"""writer.py CONF POOL IMAGE: writes numbered blocks over an image, again and again, until
its standard input ends; prints "ready" once it writes. Then it reads all blocks, and fails
if one is not as it was written last.

Debian's own interpreter, because python3-rbd belongs to it.
"""

import itertools
import select
import sys

import rados
import rbd

BLOCK = 64 * 1024


def content(number):
    return number.to_bytes(8, "little") * (BLOCK // 8)


def main():
    conf, pool, name = sys.argv[1:]
    with rados.Rados(conffile=conf, name="client.admin") as cluster:
        with cluster.open_ioctx(pool) as io, rbd.Image(io, name) as image:
            blocks = image.size() // BLOCK
            last = {}
            for number in itertools.count(1):
                image.write(content(number), number % blocks * BLOCK)
                last[number % blocks] = number
                if number == 1:
                    print("ready", flush=True)
                if select.select([sys.stdin], [], [], 0)[0]:
                    break
            for block, number in last.items():
                if image.read(block * BLOCK, BLOCK) != content(number):
                    sys.exit(f"block {block} has not what write {number} wrote")


main()
