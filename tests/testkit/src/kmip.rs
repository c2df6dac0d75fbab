//! A real KMIP server, PyKMIP, on this machine, with one key.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{run, skipped::skip_uninstalled};

/// A server, its key, and the certificates of both sides.
pub struct KmipServer {
    process: Child,
    dir: TempDir,
    port: u16,
    key: String,
}

/// Runs Python with PyKMIP; scripts/setup.sh installs it.
const PYTHON: &str = "pykmip-python";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kmip/server.py");

impl KmipServer {
    /// `None`: PyKMIP is not installed.
    pub fn start() -> Option<Self> {
        if Command::new(PYTHON).arg("--version").output().is_err() {
            skip_uninstalled("no PyKMIP: passphrases sealed by KMIP");
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        make_certificates(dir.path());
        let errors = fs::File::create(dir.path().join("errors")).expect("a file");
        let mut process = Command::new(PYTHON)
            .args(["-W", "ignore", SCRIPT])
            .arg(dir.path())
            .env("HOME", dir.path())
            // Its manager has a directory there.
            .env("TMPDIR", dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .expect("PyKMIP");
        let mut line = String::new();
        let stdout = process.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let errors = || fs::read_to_string(dir.path().join("errors")).expect("a file");
        let printed = line.trim().split_once(' ');
        let (port, key) = printed.unwrap_or_else(|| panic!("no server: {}", errors()));
        Some(Self {
            port: port.parse().expect("a port"),
            key: key.to_owned(),
            process,
            dir,
        })
    }

    /// Where it listens.
    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The section of ceph-csi's configuration for this server, with these settings.
    pub fn section(&self, more: &[(&str, &str)]) -> Value {
        let mut section = json!({
            "encryptionKMSType": "kmip",
            "KMIP_ENDPOINT": self.endpoint(),
            "READ_TIMEOUT": 10,
            "WRITE_TIMEOUT": "10",
        });
        for (key, value) in more {
            section[*key] = json!(value);
        }
        section
    }

    /// Puts the Secret of a section there, as Kubernetes mounts it.
    pub fn mount_secret(&self, secrets: &Path) {
        let secret = secrets.join("ceph-csi-kmip-credentials");
        fs::create_dir_all(&secret).expect("a directory");
        for (key, file) in [
            ("CA_CERT", "ca.crt"),
            ("CLIENT_CERT", "client.crt"),
            ("CLIENT_KEY", "client.key"),
        ] {
            fs::copy(self.dir.path().join(file), secret.join(key)).expect("a file");
        }
        fs::write(secret.join("UNIQUE_IDENTIFIER"), &self.key).expect("a file");
    }

    /// How often it was asked for that operation.
    pub fn requests(&self, operation: &str) -> usize {
        let log = fs::read_to_string(self.dir.path().join("log")).expect("a log");
        let logged = format!("Processing operation: {operation}\n");
        log.matches(&logged).count()
    }
}

impl Drop for KmipServer {
    fn drop(&mut self) {
        // Its standard input ends, and it ends its own processes.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// An authority, and a certificate of each side that it signed.
fn make_certificates(dir: &Path) {
    let at = |name: &str| dir.join(name).display().to_string();
    let new_key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ];
    let request = |name: &str, more: &[&str]| {
        let (subject, key) = (format!("/CN={name}"), at(&format!("{name}.key")));
        let own = ["-subj", &subject, "-keyout", &key];
        run(&[&["openssl", "req"], &new_key[..], &own, more].concat());
    };
    request("ca", &["-x509", "-out", &at("ca.crt")]);
    for (name, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let (signing, extensions) = (at(&format!("{name}.csr")), at("extensions"));
        let text = format!("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage={usage}\n");
        fs::write(&extensions, text).expect("a file");
        request(name, &["-out", &signing]);
        let out = at(&format!("{name}.crt"));
        run(&[
            "openssl",
            "x509",
            "-req",
            "-in",
            &signing,
            "-CA",
            &at("ca.crt"),
            "-CAkey",
            &at("ca.key"),
            "-CAcreateserial",
            "-extfile",
            &extensions,
            "-out",
            &out,
        ]);
    }
}
