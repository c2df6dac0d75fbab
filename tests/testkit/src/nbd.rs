//! Servers of NBD exports that a story can kill and start again.

use std::{
    fs,
    net::TcpStream,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use super::{Sandbox, Volume, eventually, run_err, skip_test};

/// Whether this kernel can attach NBD exports. Stories that need that are skipped
/// elsewhere.
pub fn kernel_has_nbd() -> bool {
    let there = Path::new("/sys/module/nbd").exists();
    if !there {
        skip_test("the kernel module nbd is not loaded here");
    }
    there
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Address {
    Unix(PathBuf),
    Tcp(u16),
}

/// A server program over a directory of images, whose names are the exports'.
pub struct NbdServer {
    command: Vec<String>,
    pub address: Address,
    images: PathBuf,
    process: Option<Child>,
}

impl NbdServer {
    /// nbdkit on a unix socket.
    pub async fn start(sandbox: &Sandbox) -> Self {
        Self::start_with(sandbox, false, &[]).await
    }

    /// nbdkit, over TCP or not, with more arguments such as filters, which come
    /// before the plugin's.
    pub async fn start_with(sandbox: &Sandbox, tcp: bool, args: &[&str]) -> Self {
        let images = sandbox.dir().join("exports");
        fs::create_dir_all(&images).expect("a directory");
        Self::nbdkit(sandbox, images, tcp, args).await
    }

    /// nbdkit over a pool.
    pub async fn of_pool(sandbox: &Sandbox, pool: &Path, tcp: bool) -> Self {
        Self::nbdkit(sandbox, pool.to_owned(), tcp, &[]).await
    }

    async fn nbdkit(sandbox: &Sandbox, images: PathBuf, tcp: bool, args: &[&str]) -> Self {
        let address = if tcp { free_port() } else { unix(sandbox) };
        // One request of a connection at a time: of several threads that answer one,
        // those that find it closed abort nbdkit (1.32, connections.c).
        let mut command = words("nbdkit -f --exit-with-parent --threads 1");
        match &address {
            Address::Unix(socket) => command.extend(["-U".into(), text(socket)]),
            Address::Tcp(port) => command.extend(words(&format!("-i 127.0.0.1 -p {port}"))),
        }
        let (before, after): (Vec<&str>, Vec<&str>) =
            args.iter().partition(|arg| arg.starts_with('-'));
        command.extend(before.into_iter().map(str::to_owned));
        command.extend(["file".into(), format!("dir={}", images.display())]);
        command.extend(after.into_iter().map(str::to_owned));
        Self::run(command, address, images).await
    }

    /// qemu-nbd over one image.
    pub async fn qemu(sandbox: &Sandbox, tcp: bool, name: &str, args: &[&str]) -> Self {
        let images = sandbox.dir().join("exports");
        let address = if tcp { free_port() } else { unix(sandbox) };
        let mut command = words("qemu-nbd -t -e 16 -f raw -x");
        command.push(name.to_owned());
        match &address {
            Address::Unix(socket) => command.extend(["-k".into(), text(socket)]),
            Address::Tcp(port) => command.extend(words(&format!("-b 127.0.0.1 -p {port}"))),
        }
        command.extend(args.iter().map(|&arg| arg.to_owned()));
        command.push(text(&images.join(name)));
        Self::run(command, address, images).await
    }

    /// nbdkit as it stands in for the TLS that the kernel lacks: a client of the
    /// other server over TLS, itself plain and on a unix socket.
    pub async fn tunnel(sandbox: &Sandbox, to: &Self, export: &str, psk: &Path) -> Self {
        let Address::Tcp(port) = to.address else {
            panic!("TLS is for TCP");
        };
        let address = unix(sandbox);
        let mut command = words("nbdkit -f --exit-with-parent -U");
        let Address::Unix(socket) = &address else {
            unreachable!("it was just made");
        };
        command.push(text(socket));
        command.extend(words(
            "nbd hostname=127.0.0.1 tls=require tls-username=node",
        ));
        command.push(format!("port={port}"));
        command.push(format!("export={export}"));
        command.push(format!("tls-psk={}", psk.display()));
        Self::run(command, address, to.images.clone()).await
    }

    /// A client of another server's export, which serves it on: stands for a node
    /// where the kernel has no NBD driver.
    pub async fn client_of(sandbox: &Sandbox, uri: &str) -> Self {
        let socket = sandbox.dir().join("client.sock");
        let mut command = words("qemu-nbd -t -f raw -k");
        command.extend([text(&socket), uri.to_owned()]);
        let client = Self::run(command, Address::Unix(socket), PathBuf::new()).await;
        // It listens before it has connected, and answers after.
        client.exports().expect("an answer");
        client
    }

    /// The exports that it lists, each with its size in bytes. An error if one disappeared
    /// before its size was read.
    pub fn exports(&self) -> Result<Vec<(String, u64)>, String> {
        let Address::Unix(socket) = &self.address else {
            panic!("qemu-nbd is given a unix socket here");
        };
        let listed = run_err(&["qemu-nbd", "--list", "-k", &text(socket)])?;
        let values = |key: &str| -> Vec<String> {
            let lines = listed
                .lines()
                .filter_map(|line| line.trim().strip_prefix(key));
            lines
                .map(|value| value.trim_matches([' ', '\'']).to_owned())
                .collect()
        };
        let sizes = values("size:");
        let sizes = sizes.iter().map(|bytes| bytes.parse().expect("a size"));
        Ok(values("export:").into_iter().zip(sizes).collect())
    }

    async fn run(command: Vec<String>, address: Address, images: PathBuf) -> Self {
        let mut server = Self {
            command,
            address,
            images,
            process: None,
        };
        server.restart().await;
        server
    }

    /// Another life after [`NbdServer::kill9`].
    pub async fn restart(&mut self) {
        let child = Command::new(&self.command[0])
            .args(&self.command[1..])
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{:?}: {error}", self.command));
        self.process = Some(child);
        let address = self.address.clone();
        eventually("the server listens", async || match &address {
            Address::Unix(path) => UnixStream::connect(path).map(drop).ok(),
            Address::Tcp(port) => TcpStream::connect(("127.0.0.1", *port)).map(drop).ok(),
        })
        .await;
    }

    /// As when its machine fails.
    pub fn kill9(&mut self) {
        if let Some(mut child) = self.process.take() {
            if let Ok(Some(ended)) = child.try_wait() {
                eprintln!("{:?} had ended by itself: {ended}", self.command);
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Address::Unix(path) = &self.address {
            let _ = fs::remove_file(path);
        }
    }

    /// A blank image of `bytes`, whether or not it is served by this server.
    pub fn image(sandbox: &Sandbox, name: &str, bytes: u64) -> PathBuf {
        let images = sandbox.dir().join("exports");
        fs::create_dir_all(&images).expect("a directory");
        let image = images.join(name);
        fs::File::create(&image)
            .and_then(|file| file.set_len(bytes))
            .expect("an image");
        image
    }

    /// The image behind a volume.
    pub fn image_of(&self, volume: &Volume) -> PathBuf {
        self.images.join(&volume.context["export"])
    }

    /// Its address, of no export.
    pub fn uri(&self) -> String {
        match &self.address {
            Address::Unix(path) => format!("nbd+unix:///?socket={}", path.display()),
            Address::Tcp(port) => format!("nbd://127.0.0.1:{port}"),
        }
    }

    /// The volume over the export of its own name. A story that fails leaves
    /// devices without a server, which hold up others of the same kernel thread:
    /// not for long.
    pub fn over(&self, volume: Volume) -> Volume {
        let name = volume.handle.clone();
        let volume = volume
            .with("backend", "nbd")
            .with("export", &name)
            .with("requestTimeout", "2")
            .with("deadConnectionTimeout", "30");
        match &self.address {
            Address::Unix(path) => volume.with("socket", &text(path)),
            Address::Tcp(port) => volume
                .with("host", "127.0.0.1")
                .with("port", &port.to_string()),
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.kill9();
    }
}

/// The attached NBD devices (`/dev/nbdN`) whose backend identifier has this in it,
/// which outlives the attachment, and the size, by a moment.
pub fn nbds_over(part: &str) -> Vec<String> {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let mut devices: Vec<_> = fs::read_dir("/sys/block")
        .expect("sysfs")
        .flatten()
        .filter(|entry| {
            let device = entry.path();
            read(device.join("backend")).contains(part) && read(device.join("size")) != "0\n"
        })
        .map(|entry| format!("/dev/{}", entry.file_name().display()))
        .collect();
    devices.sort();
    devices
}

/// Another process may take it first.
fn free_port() -> Address {
    Address::Tcp(super::free_port())
}

/// A socket that nothing else listens on.
fn unix(sandbox: &Sandbox) -> Address {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let number = MADE.fetch_add(1, Relaxed);
    Address::Unix(sandbox.dir().join(format!("nbd-{number}.sock")))
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
