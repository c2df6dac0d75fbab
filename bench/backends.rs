//! What volumes are made of: where their bytes are, and how each way reaches them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use testkit::{
    BareContent, BareDevice, BareExport, BareImageFile, BareVolume, MIB, NbdServer, Sandbox,
    Volume, run,
};
use uring_csi::internals::{Export, Server};

use crate::by_exec::ByExec;

/// Bytes of a volume, unless the case has many.
pub const SIZE: u64 = 1024 * MIB;

/// A kind of volume, blank, known by its name.
pub trait Backend {
    /// A case's name, for this kind.
    fn title(&self, case: &str) -> String;

    /// Makes it of that many bytes, or forgets its content.
    fn blank(&self, name: &str, bytes: u64);

    /// One that is there, as the orchestrator has it; raw where the file system is "block".
    fn known(&self, name: &str, fs_type: &str) -> Volume;

    /// A new one of [`SIZE`].
    fn volume(&self, name: &str, fs_type: &str) -> Volume {
        self.blank(name, SIZE);
        self.known(name, fs_type)
    }

    /// Another with the content of one that is there.
    fn copy(&self, from: &str, name: &str);

    /// Removes its bytes, and those of the bare one of that name, where they would fill the
    /// sandbox's memory.
    fn discard(&self, _name: &str) {}

    /// A new one of [`SIZE`], as programs reach it.
    fn exec(&self, name: &str, fs_type: &str) -> ByExec;

    /// A new one, of a name of its own, as bare system calls reach it.
    fn bare_device(&self, name: &str, bytes: u64) -> Box<dyn BareDevice>;

    /// Where its files are.
    fn sandbox(&self) -> &Sandbox;

    /// A volume on such a device.
    fn bare(&self, name: &str, bytes: u64, content: BareContent) -> BareVolume {
        let device = self.bare_device(name, bytes);
        BareVolume::new(self.sandbox().dir(), name, device, content)
    }
}

/// Images in a pool, by loop devices.
pub struct Images<'a>(pub &'a Sandbox);

impl Images<'_> {
    fn image(&self, name: &str) -> PathBuf {
        self.0.pool("main").join(format!("{name}.img"))
    }

    fn bare_image(&self, name: &str) -> PathBuf {
        self.0.dir().join(format!("{name}-bare-image"))
    }
}

impl Backend for Images<'_> {
    fn title(&self, case: &str) -> String {
        case.to_owned()
    }

    fn blank(&self, name: &str, bytes: u64) {
        fs::File::create(self.image(name))
            .and_then(|image| image.set_len(bytes))
            .expect("an image");
    }

    fn known(&self, name: &str, fs_type: &str) -> Volume {
        self.0.known_volume_in("main", name, fs_type)
    }

    fn copy(&self, from: &str, name: &str) {
        copy_file(&self.image(from), &self.image(name));
    }

    fn discard(&self, name: &str) {
        for file in [self.image(name), self.bare_image(name)] {
            fs::remove_file(file).expect("removed");
        }
    }

    fn exec(&self, name: &str, fs_type: &str) -> ByExec {
        self.blank(name, SIZE);
        let attach = format!("losetup -f --show {}", self.image(name).display());
        ByExec::new(self.0.dir(), name, fs_type, &attach, ["losetup", "-d"])
    }

    fn bare_device(&self, name: &str, bytes: u64) -> Box<dyn BareDevice> {
        Box::new(BareImageFile::new(self.bare_image(name), bytes))
    }

    fn sandbox(&self) -> &Sandbox {
        self.0
    }
}

/// Exports of an nbdkit.
pub struct Exports<'a> {
    pub sandbox: &'a Sandbox,
    pub server: NbdServer,
}

impl Exports<'_> {
    fn file(&self, name: &str) -> PathBuf {
        self.sandbox.dir().join("exports").join(name)
    }

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

    fn blank(&self, name: &str, bytes: u64) {
        NbdServer::image(self.sandbox, name, bytes);
    }

    fn known(&self, name: &str, fs_type: &str) -> Volume {
        self.server.over(match fs_type {
            "block" => Volume::block(name),
            fs_type => Volume::filesystem(name, fs_type),
        })
    }

    fn copy(&self, from: &str, name: &str) {
        copy_file(&self.file(from), &self.file(name));
    }

    fn discard(&self, name: &str) {
        for name in [name, &bare(name)] {
            fs::remove_file(self.file(name)).expect("removed");
        }
    }

    /// With as many connections as the agent makes.
    fn bare_device(&self, name: &str, bytes: u64) -> Box<dyn BareDevice> {
        let name = bare(name);
        self.blank(&name, bytes);
        let cpus = std::thread::available_parallelism().expect("a number");
        let address = self.server.address.clone();
        Box::new(BareExport::new(address, &name, cpus.get().min(2)))
    }

    fn sandbox(&self) -> &Sandbox {
        self.sandbox
    }

    fn exec(&self, name: &str, fs_type: &str) -> ByExec {
        self.blank(name, SIZE);
        // With no device named, the kernel chooses one.
        let attach = match self.export(name).server() {
            Server::Unix { socket } => format!("nbd-client -unix {socket} -N {name}"),
            Server::Tcp { host, port } => format!("nbd-client {host} {port} -N {name}"),
        };
        let dir = self.sandbox.dir();
        ByExec::new(dir, name, fs_type, &attach, ["nbd-client", "-d"])
    }
}

/// The export or image that bare system calls reach, of a volume of that name.
pub fn bare(name: &str) -> String {
    format!("{name}-bare")
}

fn copy_file(from: &Path, to: &Path) {
    let [from, to] = [from, to].map(|path| path.to_str().expect("UTF-8"));
    run(&["cp", "--sparse=always", from, to]);
}
