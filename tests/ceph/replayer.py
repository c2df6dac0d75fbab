#!/usr/bin/python3
"""replayer.py CONF POOL GLOBAL_ID: reports as rbd-mirror does that it replays the
mirrored image of that global id, until its standard input ends; prints "ready" once it
has. It replays nothing: rbd-mirror needs a second cluster.

A report counts while its author watches `rbd_mirroring` (Ceph's cls_rbd.cc,
`image_status_get`). Debian's own interpreter, because python3-rados belongs to it.
"""

import struct
import sys

import rados

REPLAYING = 4


def text(value):
    return struct.pack("<I", len(value)) + value.encode()


def main():
    conf, pool, global_id = sys.argv[1:]
    # cls::rbd::MirrorImageSiteStatus, version 1: state, description, time, whether up.
    status = struct.pack("<B", REPLAYING) + text("replaying") + struct.pack("<IIB", 0, 0, 1)
    status = struct.pack("<BBI", 1, 1, len(status)) + status
    with rados.Rados(conffile=conf, name="client.admin") as cluster:
        with cluster.open_ioctx(pool) as io:
            with io.watch("rbd_mirroring", lambda *_: None):
                report = text(global_id) + status
                io.execute("rbd_mirroring", "rbd", "mirror_image_status_set", report)
                print("ready", flush=True)
                sys.stdin.read()


main()
