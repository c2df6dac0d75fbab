//! NFS servers that a story can kill and start again.

use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use super::{Sandbox, Volume, eventually, free_port, run, run_err, skip_test, skip_uninstalled};

/// Whether this kernel can mount directories of NFS servers, and a server is installed.
/// Stories that need that are skipped elsewhere.
pub fn can_use_nfs() -> bool {
    if !Path::new("/sys/module/nfsv4").exists() {
        skip_test("the kernel module nfsv4 is not loaded here");
        return false;
    }
    if !Path::new("/usr/bin/ganesha.nfsd").exists() {
        skip_uninstalled("nfs-ganesha is not installed");
        return false;
    }
    true
}

/// The share of every server.
pub const SHARE: &str = "/share";

/// nfs-ganesha over one directory.
pub struct NfsServer {
    dir: PathBuf,
    export: PathBuf,
    port: u16,
    version: u8,
    process: Option<Child>,
    _rpcbind: Option<Rpcbind>,
}

impl NfsServer {
    /// A server of that name whose share is an xfs of its own: nfs-ganesha exports no tmpfs
    /// since its version 6.
    pub async fn start(sandbox: &Sandbox, name: &str) -> Self {
        let export = sandbox.reflink_pool(&format!("{name}-export"));
        Self::start_over(sandbox, name, export).await
    }

    /// A server of that name whose share is the directory, by NFS 4.
    pub async fn start_over(sandbox: &Sandbox, name: &str, export: PathBuf) -> Self {
        Self::start_with(sandbox, name, export, 4, None).await
    }

    /// A server of NFS 3 alone. One story at a time: of two servers, this machine's rpcbind
    /// would name one.
    pub async fn start_version_3(sandbox: &Sandbox, name: &str) -> Self {
        let export = sandbox.reflink_pool(&format!("{name}-export"));
        let rpcbind = Rpcbind::start().await;
        Self::start_with(sandbox, name, export, 3, rpcbind).await
    }

    async fn start_with(
        sandbox: &Sandbox,
        name: &str,
        export: PathBuf,
        version: u8,
        rpcbind: Option<Rpcbind>,
    ) -> Self {
        let dir = sandbox.dir().join(name);
        fs::create_dir_all(dir.join("recovery")).expect("a directory");
        let port = free_port();
        let (at, exported) = (dir.display(), export.display());
        // A client takes servers of one owner for one server. One that starts again answers
        // once its clients have had time to reclaim.
        let config = format!(
            "NFS_CORE_PARAM {{ NFS_Port = {port}; Protocols = {version}; mount_path_pseudo = true; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}\n\
             NFSV4 {{ Grace_Period = 4; Lease_Lifetime = 10; RecoveryBackend = fs; RecoveryRoot = {at}/recovery; Server_Owner = \"{at}\"; Server_Scope = \"{at}\"; }}\n\
             NFS_KRB5 {{ Active_krb5 = false; }}\n\
             EXPORT_DEFAULTS {{ Squash = No_Root_Squash; Access_Type = RW; SecType = sys; Protocols = {version}; }}\n\
             EXPORT {{ Export_Id = 1; Path = {exported}; Pseudo = {SHARE}; FSAL {{ Name = VFS; }} }}\n"
        );
        fs::write(dir.join("ganesha.conf"), config).expect("a file");
        let mut server = Self {
            dir,
            export,
            port,
            version,
            process: None,
            _rpcbind: rpcbind,
        };
        server.restart().await;
        server
    }

    /// Another life after [`NfsServer::kill9`].
    pub async fn restart(&mut self) {
        self.spawn();
        let port = self.port;
        eventually("the server listens", async || {
            TcpStream::connect(("127.0.0.1", port)).map(drop).ok()
        })
        .await;
        if self.version == 3 {
            // Its mount service registers after that. The NULL procedure of program 100005
            // is not answered by an earlier life's registration, which names a dead port.
            eventually("the mount service answers", async || {
                run_err(&["rpcinfo", "-T", "tcp", "127.0.0.1", "100005", "3"]).ok()
            })
            .await;
        }
    }

    fn spawn(&mut self) {
        let file = |name| self.dir.join(name);
        let child = Command::new("ganesha.nfsd")
            .arg("-F")
            .arg("-f")
            .arg(file("ganesha.conf"))
            .arg("-p")
            .arg(file("pid"))
            .arg("-L")
            .arg(file("log"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("ganesha.nfsd");
        self.process = Some(child);
    }

    /// As when its machine fails.
    pub fn kill9(&mut self) {
        if let Some(mut child) = self.process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_file(self.dir.join("pid"));
    }

    /// It accepts connections and answers nothing, as when its disk hangs.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// It goes on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("a server that runs");
        let pid = Pid::from_child(process);
        kill_process(pid, signal).expect("a signal");
    }

    /// The exported directory.
    pub fn export(&self) -> PathBuf {
        self.export.clone()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Mounts the share by the newest version of NFS, as kubelet does for a controller's pod.
    pub fn mount(&self, at: &Path) {
        fs::create_dir_all(at).expect("a directory");
        let options = format!("vers=4.2,addr=127.0.0.1,port={}", self.port);
        let source = format!("127.0.0.1:{SHARE}");
        let at = at.to_str().expect("UTF-8");
        run(&["mount", "-i", "-t", "nfs", "-o", &options, &source, at]);
    }

    /// The static volume over a directory of the share, made if missing.
    pub fn volume(&self, handle: &str, sub_dir: &str) -> Volume {
        fs::create_dir_all(self.export().join(sub_dir)).expect("a directory");
        self.known_volume(handle, sub_dir)
    }

    /// The static volume over a directory of the share.
    pub fn known_volume(&self, handle: &str, sub_dir: &str) -> Volume {
        Volume::filesystem(handle, "")
            .with("server", "127.0.0.1")
            .with("share", SHARE)
            .with("subDir", sub_dir)
            .with("mountOptions", &format!("port={}", self.port))
    }
}

impl Drop for NfsServer {
    fn drop(&mut self) {
        // A story that fails leaves mounts, whose unmount waits for a live server.
        match self.process {
            Some(_) => self.thaw(),
            None => self.spawn(),
        }
        let _ = run_err(&["umount", "--lazy", "--all", "--types", "nfs,nfs4"]);
        self.kill9();
    }
}

/// The portmapper, with which a server of NFS 3 registers, and which its clients ask.
struct Rpcbind(Child);

impl Rpcbind {
    /// None where this machine has one.
    async fn start() -> Option<Self> {
        let listens = || TcpStream::connect(("127.0.0.1", 111)).map(drop).ok();
        if listens().is_some() {
            return None;
        }
        let child = Command::new("rpcbind")
            .arg("-f")
            .stdin(Stdio::null())
            .spawn()
            .expect("rpcbind");
        let started = Self(child);
        eventually("rpcbind listens", async || listens()).await;
        Some(started)
    }
}

impl Drop for Rpcbind {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
