"""A KMIP server (PyKMIP) with one key: server.py DIR

DIR has `ca.crt`, `server.crt`, `server.key`, `client.crt` and `client.key`. Once the server
answers, it prints its port and the identifier of the key, an active one of AES. It ends when
its standard input does.
"""

import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import threading
import time

from kmip.core import enums
from kmip.pie import client
from kmip.services.server import KmipServer

directory = pathlib.Path(sys.argv[1])


def path(name):
    return str(directory / name)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port):
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.02)


def make_key(port):
    wait_for(port)
    with client.ProxyKmipClient(
        hostname="127.0.0.1",
        port=port,
        cert=path("client.crt"),
        key=path("client.key"),
        ca=path("ca.crt"),
        kmip_version=enums.KMIPVersion.KMIP_1_4,
    ) as administrator:
        usage = [enums.CryptographicUsageMask.ENCRYPT, enums.CryptographicUsageMask.DECRYPT]
        key = administrator.create(
            enums.CryptographicAlgorithm.AES, 256, cryptographic_usage_mask=usage
        )
        administrator.activate(key)
    print(port, key, flush=True)
    sys.stdin.read()
    # The server's manager is a process of its own.
    os.killpg(0, signal.SIGKILL)


os.setsid()
# Python 3.14 would start the server's manager by another method, which runs this file again.
multiprocessing.set_start_method("fork")
port = free_port()
server = KmipServer(
    hostname="127.0.0.1",
    port=port,
    certificate_path=path("server.crt"),
    key_path=path("server.key"),
    ca_path=path("ca.crt"),
    auth_suite="TLS1.2",
    config_path=None,
    log_path=path("log"),
    database_path=path("database"),
    enable_tls_client_auth=True,
    tls_cipher_suites="TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
)
server.start()
threading.Thread(target=make_key, args=[port], daemon=True).start()
server.serve()
