//! What volumes are made of: where their bytes are, and how each way reaches them.

use std::{fs, path::PathBuf};

use testkit::{BareVolume, MIB, NbdServer, Sandbox, Volume};
use uring_csi::internals::{Export, Server};

use crate::by_exec::ByExec;

/// Bytes of every volume.
pub const SIZE: u64 = 1024 * MIB;

/// A kind of volume, blank and of [`SIZE`], known by its name.
pub trait Backend {
    /// A case's name, for this kind.
    fn title(&self, case: &str) -> String;

    /// Makes it, or forgets its content.
    fn blank(&self, name: &str);

    /// A new one, as the orchestrator has it; raw where the file system is "block".
    fn volume(&self, name: &str, fs_type: &str) -> Volume;

    /// A new one, as programs reach it.
    fn exec(&self, name: &str, fs_type: &str) -> ByExec;

    /// A new one with an ext4, as bare system calls reach it.
    fn bare(&self, _name: &str) -> Option<BareVolume> {
        None
    }
}

/// Images in a pool, by loop devices.
pub struct Images<'a>(pub &'a Sandbox);

impl Images<'_> {
    fn image(&self, name: &str) -> PathBuf {
        self.0.pool("main").join(format!("{name}.img"))
    }
}

impl Backend for Images<'_> {
    fn title(&self, case: &str) -> String {
        case.to_owned()
    }

    fn blank(&self, name: &str) {
        fs::File::create(self.image(name))
            .and_then(|image| image.set_len(SIZE))
            .expect("an image");
    }

    fn volume(&self, name: &str, fs_type: &str) -> Volume {
        self.0.volume_in("main", name, fs_type, SIZE)
    }

    fn exec(&self, name: &str, fs_type: &str) -> ByExec {
        self.blank(name);
        let attach = format!("losetup -f --show {}", self.image(name).display());
        ByExec::new(self.0.dir(), name, fs_type, &attach, ["losetup", "-d"])
    }

    fn bare(&self, name: &str) -> Option<BareVolume> {
        Some(BareVolume::new(self.0.dir(), name, SIZE))
    }
}

/// Exports of an nbdkit.
pub struct Exports<'a> {
    pub sandbox: &'a Sandbox,
    pub server: NbdServer,
}

impl Exports<'_> {
    /// Where a volume's bytes are.
    pub fn export(&self, name: &str) -> Export {
        let server = self.server.uri().parse().expect("an address");
        Export::new(server, name).expect("an export's name")
    }
}

impl Backend for Exports<'_> {
    fn title(&self, case: &str) -> String {
        let over = match self.export("any").server() {
            Server::Unix { .. } => "a unix socket",
            Server::Tcp { .. } => "TCP",
        };
        format!("NBD over {over}: {case}")
    }

    fn blank(&self, name: &str) {
        NbdServer::image(self.sandbox, name, SIZE);
    }

    fn volume(&self, name: &str, fs_type: &str) -> Volume {
        self.blank(name);
        self.server.over(match fs_type {
            "block" => Volume::block(name),
            fs_type => Volume::filesystem(name, fs_type),
        })
    }

    fn exec(&self, name: &str, fs_type: &str) -> ByExec {
        self.blank(name);
        // With no device named, the kernel chooses one.
        let attach = match self.export(name).server() {
            Server::Unix { socket } => format!("nbd-client -unix {socket} -N {name}"),
            Server::Tcp { host, port } => format!("nbd-client {host} {port} -N {name}"),
        };
        let dir = self.sandbox.dir();
        ByExec::new(dir, name, fs_type, &attach, ["nbd-client", "-d"])
    }
}
