//! A real OpenBao: Vault's API, on this machine, with its data in memory.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{run, skipped::skip_uninstalled};

/// A server with these stores and logins:
///
/// ```text
///  secret/   key-value store, version 2
///  kv1/      key-value store, version 1
///  jwt/      logs in a web token as the role `csi`
/// ```
///
/// Who logs in as `csi` may use both stores, below the folder `csi`.
pub struct VaultServer {
    process: Child,
    dir: TempDir,
    port: u16,
}

const ROOT_TOKEN: &str = "root";

impl VaultServer {
    /// `None`: OpenBao is not installed.
    pub fn start() -> Option<Self> {
        if Command::new("bao").arg("version").output().is_err() {
            skip_uninstalled("no OpenBao: passphrases in Vault");
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        // Another process may take the port before the server does.
        let server = (0..10).find_map(|_| Self::start_in(dir.path()));
        let (process, port) = server.expect("a server that listens");
        let server = Self { process, dir, port };
        server.configure();
        Some(server)
    }

    fn start_in(dir: &Path) -> Option<(Child, u16)> {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let log = fs::File::create(dir.join("log")).expect("a log");
        let mut process = Command::new("bao")
            .args(["server", "-dev", "-dev-tls", "-dev-no-store-token"])
            .arg(format!("-dev-tls-cert-dir={}", dir.display()))
            .arg(format!("-dev-root-token-id={ROOT_TOKEN}"))
            .arg(format!("-dev-listen-address=127.0.0.1:{port}"))
            .env("HOME", dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("bao");
        loop {
            let log = fs::read_to_string(dir.join("log")).expect("a log");
            if log.contains("server started!") {
                return Some((process, port));
            }
            if process.try_wait().expect("a child").is_some() {
                assert!(log.contains("address already in use"), "{log}");
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn configure(&self) {
        let key = self.path("key.pem");
        run(&["openssl", "genrsa", "-out", &key, "2048"]);
        let public = self.path("public.pem");
        run(&["openssl", "rsa", "-in", &key, "-pubout", "-out", &public]);
        let policy = self.path("policy");
        let rules = ["kv1/csi", "secret/data/csi", "secret/metadata/csi"]
            .map(|path| format!("path \"{path}/*\" {{ capabilities = [\"create\", \"update\", \"read\", \"delete\"] }}\n"));
        fs::write(&policy, rules.concat()).expect("a policy");
        self.bao(&["secrets", "enable", "-path=kv1", "-version=1", "kv"]);
        self.bao(&["auth", "enable", "jwt"]);
        self.bao(&["policy", "write", "csi", &policy]);
        let keys = format!("jwt_validation_pubkeys=@{public}");
        self.bao(&["write", "auth/jwt/config", &keys]);
        let role = "role_type=jwt user_claim=sub bound_audiences=vault token_policies=csi";
        let write = ["write", "auth/jwt/role/csi"].into_iter();
        self.bao(&write.chain(role.split(' ')).collect::<Vec<_>>());
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// The server's command line, as its administrator.
    pub fn bao(&self, args: &[&str]) -> String {
        let done = self.try_bao(args);
        done.unwrap_or_else(|why| panic!("bao {args:?}: {why}"))
    }

    /// The same; an error has what it printed.
    pub fn try_bao(&self, args: &[&str]) -> Result<String, String> {
        let output = Command::new("bao")
            .args(args)
            .env("BAO_ADDR", self.address())
            .env("BAO_TOKEN", ROOT_TOKEN)
            .env("BAO_CACERT", self.path("vault-ca.pem"))
            .env("HOME", self.dir.path())
            .output()
            .expect("bao");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    }

    pub fn address(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The certificate that signed the server's.
    pub fn ca(&self) -> String {
        fs::read_to_string(self.path("vault-ca.pem")).expect("a certificate")
    }

    /// A web token, as Kubernetes gives to a pod, that the role `csi` accepts.
    pub fn web_token(&self) -> String {
        let to_sign = [
            json!({"alg": "RS256", "typ": "JWT"}),
            json!({"sub": "system:serviceaccount:csi:node", "aud": "vault", "nbf": 1, "exp": 4_000_000_000_u32}),
        ]
        .map(|part: Value| BASE64_URL_SAFE_NO_PAD.encode(part.to_string()))
        .join(".");
        let (text, signature) = (self.path("to-sign"), self.path("signature"));
        fs::write(&text, &to_sign).expect("a file");
        let key = self.path("key.pem");
        run(&[
            "openssl", "dgst", "-sha256", "-sign", &key, "-out", &signature, &text,
        ]);
        let signature = fs::read(signature).expect("a signature");
        format!("{to_sign}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature))
    }

    /// The section of ceph-csi's configuration for this server, with these settings; the
    /// certificate is in the request's secrets, as `vault-ca`.
    pub fn section(&self, more: &[(&str, &str)]) -> Value {
        let mut section = json!({
            "encryptionKMSType": "vault",
            "vaultAddress": self.address(),
            "vaultAuthPath": "/v1/auth/jwt/login",
            "vaultRole": "csi",
            "vaultBackend": "kv-v2",
            "vaultPassphrasePath": "csi",
            "vaultCAFromSecret": "vault-ca",
        });
        for (key, value) in more {
            section[*key] = json!(value);
        }
        section
    }

    /// The passphrase under a volume's handle in the store `secret`; none if there is none.
    pub fn passphrase(&self, handle: &str) -> Option<String> {
        let path = format!("secret/csi/{handle}");
        match self.try_bao(&["kv", "get", "-format=json", &path]) {
            Ok(json) => {
                let json: Value = serde_json::from_str(&json).expect("JSON");
                let text = &json["data"]["data"]["data"]["passphrase"];
                Some(text.as_str().expect("a passphrase").to_owned())
            }
            Err(why) => {
                assert!(why.contains("No value found"), "{why}");
                None
            }
        }
    }
}

impl Drop for VaultServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
