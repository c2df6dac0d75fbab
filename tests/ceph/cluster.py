#!/usr/bin/python3
"""cluster.py DIR [LINGER [SIZE]]: a Ceph cluster of SIZE (1) monitors, one manager
and SIZE OSDs in memory, for tests; with one, half a second until its pool takes I/O.

The caller has made DIR/users and holds a lock on it, shared (flock(2)): so may
others. The cluster prints "ready" once DIR/ready is there; it ends, and deletes
DIR, when for LINGER seconds (0) nobody has held the lock. Whatever ends this
process ends its daemons. SIGUSR1 starts those again that have ended.

DIR/ready has lines NAME=VALUE: what a client needs. With DIR/ceph.conf, `ceph` and
`rbd` are the administrator. DIR/{mon.a,mgr.x,osd.0}.pid are the daemons' process ids;
DIR/cluster.pid is this one's, and locked.

Debian's own interpreter, because python3-rados belongs to it.
"""

import base64
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path

import rados
import rbd

POOL = "rbd"
TIMEOUT = 60  # seconds until a cluster that does not come up is given up

# What ceph-csi asks of its user, for every pool, and what fencing takes besides:
# the profile allows to add to the blocklist and not to remove from it.
USER = "csi"
USER_CAPS = {
    "mon": 'profile rbd, allow command \\"osd blocklist\\"',
    "osd": "profile rbd",
    "mgr": "profile rbd",
}

# A copy of everything on each OSD, and I/O without one of several; and no waiting: for a second update of the
# maps (paxos), between deletions (sleep), for modules that nobody asks (mgr).
CONF = """
[global]
fsid = {fsid}
mon host = {monitors}
public addr = {address}
cluster addr = {address}
run dir = {dir}
log file = {dir}/$name.log
admin socket = {dir}/$name.asok
crash dir = {dir}/crash
keyring = {dir}/keyring
osd pool default size = {size}
osd pool default min size = {min_size}
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
# For erasure-coded pools of images, which the OSDs below have in memory, too.
mon debug no require bluestore for ec overwrites = true
mon max pg per osd = 1000
mgr initial modules =
mgr disabled modules = influx insights iostat localpool mirroring nfs osd_perf_query osd_support prometheus restful selftest snap_schedule stats telegraf test_orchestrator zabbix alerts
[client]
log file =
admin socket =
[mon]
mon data = {dir}/$type.$id
mon cluster log file = {dir}/cluster.log
mon data avail crit = 1
paxos propose interval = 0.01
paxos min wait = 0.01
mon tick interval = 1
[mgr]
mgr data = {dir}/$type.$id
mgr tick period = 1
mgr stats period = 1
[osd]
osd data = {dir}/$type.$id
osd objectstore = memstore
memstore device bytes = 8589934592
# By default a write in the middle of an object allocates all before it. The page size is
# about what a mapping of User-Mode Linux takes (tests/kernel/suite.sh).
memstore page set = true
memstore page size = 65536
# By default each placement group keeps 10000 entries, of 1 KiB, and 3000 requests.
osd min pg log entries = 100
osd max pg log entries = 200
osd pg log dups tracked = 200
# Debian's 18.2 has it without the leading slash.
osd class dir = {classes}
# Ended by SIGTERM, it writes its objects down, and another has them again.
osd fast shutdown = false
crush location = root=default host=test
osd snap trim sleep = 0.001
osd delete sleep = 0.001
osd recovery sleep = 0.001
"""


def key_type():
    """Of the keys that this machine's kernel takes (`aes`), where a new cluster would take
    AES-256 alone, as those of 20.2 do. Linux has it from 7.0 (CEPH_CRYPTO_AES256KRB5).
    """
    version = tuple(map(int, os.uname().release.split(".")[:2]))
    usage = subprocess.run(["ceph-authtool", "--help"], capture_output=True).stdout
    return "aes" if version < (7, 0) and b"--key-type" in usage else None


def new_keys(count, of_type):
    """cephx secrets: the type, when each was made (two numbers), the length, and the random
    bytes (CryptoKey::encode). They have the type of one that Ceph's tool makes.
    """
    command = ["ceph-authtool", "--gen-print-key"]
    command += ["--key-type", of_type] if of_type else []
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    head_bytes = struct.calcsize("<HIIH")
    secret = base64.b64decode(made.stdout)
    head, length = secret[:head_bytes], len(secret) - head_bytes
    return [base64.b64encode(head + os.urandom(length)).decode() for _ in range(count)]


def keyring(entities):
    """The text of a keyring file."""
    lines = []
    for name, (key, caps) in entities.items():
        lines += [f"[{name}]", f"key = {key}"]
        lines += [f'caps {service} = "{allowed}"' for service, allowed in caps.items()]
    return "\n".join(lines) + "\n"


class Cluster:
    def __init__(self, directory, size):
        self.dir = directory
        self.size = size
        self.conf = directory / "ceph.conf"
        self.fsid = str(uuid.uuid4())
        self.key_type = key_type()
        # Every monitor has the usual ports, at a loopback address of its own.
        net = "127." + ".".join(str(random.randint(1, 254)) for _ in range(2))
        first = random.randint(1, 254 - size)
        self.monitors = {
            name: f"{net}.{first + number}" for number, name in enumerate("abc"[:size])
        }
        self.daemons = {}
        self.deadline = time.monotonic() + TIMEOUT

    def up(self):
        osds = {str(number): str(uuid.uuid4()) for number in range(self.size)}
        of_osd = {"mon": "allow profile osd", "mgr": "allow profile osd", "osd": "allow *"}
        caps = {
            "mon.": {"mon": "allow *"},
            "client.admin": dict.fromkeys(("mon", "osd", "mgr"), "allow *"),
            "mgr.x": {"mon": "allow profile mgr", "osd": "allow *"},
            f"client.{USER}": USER_CAPS,
            **{f"osd.{osd}": of_osd for osd in osds},
        }
        keys = dict(zip(caps, new_keys(len(caps), self.key_type)))
        of_daemons = [f"mon.{name}" for name in self.monitors] + [f"osd.{osd}" for osd in osds]
        for name in (*of_daemons, "mgr.x", "crash"):
            (self.dir / name).mkdir()
        classes = next(Path("/usr").glob("lib*/rados-classes"), None)
        classes = classes or next(Path("/usr/lib").glob("*/rados-classes"))
        self.conf.write_text(
            CONF.format(
                dir=self.dir,
                fsid=self.fsid,
                monitors=", ".join(map(self.address_vector, self.monitors)),
                address=self.monitors["a"],
                size=self.size,
                min_size=max(1, self.size - 1),
                classes=classes,
            )
        )
        ring = self.dir / "keyring"
        ring.touch(mode=0o600)
        ring.write_text(keyring({name: (keys[name], caps[name]) for name in keys}))

        monmap = self.monmap()
        for name in self.monitors:
            self.tool("ceph-mon", "-i", name, "--mkfs", "--monmap", monmap, "--keyring", ring)
            self.daemon("mon", name)
        # This takes no monitor; meanwhile they start.
        for osd, of in osds.items():
            self.tool("ceph-osd", "-i", osd, "--mkfs", "--osd-uuid", of, "--no-mon-config")
        admin = self.connect()
        for osd, of in osds.items():
            self.command(admin, "osd new", uuid=of)
            self.daemon("osd", osd)
        self.daemon("mgr", "x")
        self.command(admin, "osd pool create", pool=POOL)
        self.command(admin, "osd pool application enable", pool=POOL, app="rbd")
        while self.command(admin, "osd stat")["num_up_osds"] < self.size:
            self.wait("an OSD does not come up")
        # Or the next request waits for objecter_tick_interval.
        admin.wait_for_latest_osdmap()
        with admin.open_ioctx(POOL) as pool:
            rbd.RBD().pool_init(pool, True)
        admin.shutdown()

        ready = self.dir / "ready.new"
        of_port = {
            port: ",".join(f"{address}:{port}" for address in self.monitors.values())
            for port in (6789, 3300)
        }
        ready.write_text(
            f"monitors={of_port[6789]}\nmonitors_v2={of_port[3300]}\n"
            f"fsid={self.fsid}\npool={POOL}\nuser={USER}\nkey={keys[f'client.{USER}']}\n"
            f"admin_key={keys['client.admin']}\n"
        )
        ready.rename(self.dir / "ready")

    def address_vector(self, monitor):
        address = self.monitors[monitor]
        return f"[v2:{address}:3300/0,v1:{address}:6789/0]"

    def monmap(self):
        """With `mon host` alone, a monitor would not know its own name."""
        path = self.dir / "monmap"
        each = [("--addv", name, self.address_vector(name)) for name in self.monitors]
        ciphers = ()
        if self.key_type:
            of = ("service-cipher", "allowed-ciphers", "preferred-cipher")
            ciphers = sum(((f"--auth-{setting}", self.key_type) for setting in of), ())
        self.tool("monmaptool", "--create", "--fsid", self.fsid, *sum(each, ()), *ciphers, path)
        return path

    def tool(self, program, *args):
        command = [program, "-c", self.conf, *args]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if ran.returncode:
            sys.exit(f"{program}: {ran.stdout.decode()}")

    def daemon(self, kind, name):
        # The descriptors of this process are close-on-exec.
        command = ["setpriv", "--pdeathsig", "KILL", f"ceph-{kind}", "-f"]
        command += ["-c", self.conf, "-i", name]
        own = dict(os.environ)
        if kind == "mgr":
            # The manager has an interpreter for each module, and Debian 13's bcrypt loads into
            # one of a process alone (PyO3). Only passwords of the dashboard need it.
            own["PYTHONPATH"] = python = self.dir / "python"
            python.mkdir(exist_ok=True)
            (python / "bcrypt.py").touch()
        with open(self.dir / f"{kind}.{name}.out", "ab") as out:
            daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=own
            )
        self.daemons[kind, name] = daemon
        (self.dir / f"{kind}.{name}.pid").write_text(f"{daemon.pid}\n")

    def connect(self):
        while True:
            hurry = {"mon_client_hunt_interval": "0.2"}
            admin = rados.Rados(conffile=str(self.conf), name="client.admin", conf=hurry)
            try:
                admin.connect(timeout=5)
                return admin
            except rados.Error as error:
                self.wait(f"the monitor does not answer: {error}")

    @staticmethod
    def command(admin, prefix, **arguments):
        request = json.dumps({"prefix": prefix, "format": "json", **arguments})
        code, answer, said = admin.mon_command(request, b"", timeout=TIMEOUT)
        if code:
            sys.exit(f"{prefix}: {errno.errorcode.get(-code, code)} {said}")
        return json.loads(answer) if answer.strip() else None

    def wait(self, what):
        """A moment; ends with `what` if it is too late, or a daemon has ended."""
        if any(daemon.poll() is not None for daemon in self.daemons.values()):
            tails = [path.read_text()[-2000:] for path in self.dir.glob("*.out")]
            sys.exit("\n".join([f"{what}; a daemon has ended", *tails]))
        if time.monotonic() > self.deadline:
            sys.exit(what)
        time.sleep(0.01)

    def start_again(self, *_):
        for (kind, name), daemon in self.daemons.items():
            if daemon.poll() is not None:
                self.daemon(kind, name)

    def down(self):
        for daemon in self.daemons.values():
            daemon.kill()
        # Somebody may make the directory anew meanwhile.
        old = self.dir.with_name(f"{self.dir.name}.{os.getpid()}")
        self.dir.rename(old)
        for daemon in self.daemons.values():
            daemon.wait()
        shutil.rmtree(old)


def until_unused(users, linger):
    """Returns, with the lock, when nobody has held it for a while."""
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)
        if not linger:
            return
        fcntl.flock(users, fcntl.LOCK_UN)
        time.sleep(linger)
        try:
            return fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass


def main():
    directory = Path(sys.argv[1]).resolve()
    linger = float(sys.argv[2]) if len(sys.argv) > 2 else 0
    size = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    # What one that was killed has left.
    for left in directory.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name not in ("users", "starting", "said"):
            left.unlink()
    with open(directory / "users") as users, open(directory / "cluster.pid", "w") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        own.write(f"{os.getpid()}\n")
        own.flush()
        cluster = Cluster(directory, size)
        cluster.up()
        signal.signal(signal.SIGUSR1, cluster.start_again)
        # Tests may end a daemon, too.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("ready", flush=True)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        until_unused(users, linger)
        cluster.down()


main()
