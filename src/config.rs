//! Options: from a flag, else an environment variable, else the config file, else the
//! default.
//!
//! The file is TOML; its keys are the flags' names without the dashes, its
//! values strings, numbers, booleans, or lists of them for flags that may be
//! repeated. Each value becomes the default of its flag, so every option has one
//! definition and one parser, and clap's own precedence applies.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf};

use clap::{ArgAction, Args, Command, Parser, error::ErrorKind};

use crate::{
    csi::{identity::DEFAULT_DRIVER_NAME, validate},
    endpoint::Endpoint,
    observe::{logs, traces},
};

/// Options of every service.
#[derive(Clone, Debug, Args)]
pub struct ServiceOptions {
    /// The format of log lines.
    #[arg(long, env = "URING_CSI_LOG_FORMAT", default_value = "text")]
    pub log_format: logs::LogFormat,
    /// The log level, or target=level directives.
    #[arg(
        long,
        env = "URING_CSI_LOG_LEVEL",
        default_value = "info",
        value_name = "LEVEL"
    )]
    pub log_level: String,
    /// Serve /metrics, /healthz and /readyz on this address.
    #[arg(long, env = "URING_CSI_METRICS_LISTEN", value_name = "ADDR")]
    pub metrics_listen: Option<SocketAddr>,
    /// A TOML file with more options.
    #[arg(long, env = "URING_CSI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Options of the node agent and of the controller.
#[derive(Clone, Debug, Args)]
pub struct PluginOptions {
    /// The name of the CSI driver.
    #[arg(long, env = "URING_CSI_DRIVER_NAME", default_value = DEFAULT_DRIVER_NAME, value_parser = validate::driver_name, value_name = "NAME")]
    pub driver_name: String,
    /// A socket of its own to serve csi-addons' sidecar on; without it csi-addons is not
    /// served.
    #[arg(long, env = "URING_CSI_ADDONS_ENDPOINT", value_name = "ENDPOINT")]
    pub csi_addons_endpoint: Option<Endpoint>,
    /// Where traces go.
    #[command(flatten)]
    pub traces: traces::TraceOptions,
    /// Its options as a service.
    #[command(flatten)]
    pub service: ServiceOptions,
}

/// ceph-csi's files, which the node agent and the controller read.
#[derive(Clone, Debug, Args)]
pub struct CephOptions {
    /// The Ceph clusters: ceph-csi's config.json. The controller needs librados and librbd
    /// for them.
    #[arg(long, env = "URING_CSI_CEPH_CONFIG", value_name = "FILE")]
    pub ceph_config: Option<PathBuf>,
    /// The mapping between Ceph clusters after a failover: ceph-csi's
    /// cluster-mapping.json, which need not exist.
    #[arg(
        long,
        env = "URING_CSI_CLUSTER_MAPPING",
        default_value = "/etc/ceph-csi-config/cluster-mapping.json",
        value_name = "FILE"
    )]
    pub cluster_mapping: PathBuf,
    /// The key management systems of encrypted Ceph volumes: ceph-csi's config.json for
    /// its encryptionKMSID.
    #[arg(
        long,
        env = "URING_CSI_KMS_CONFIG",
        default_value = "/etc/ceph-csi-encryption-kms-config/config.json",
        value_name = "FILE"
    )]
    pub kms_config: PathBuf,
    /// The Secrets and ConfigMaps that the key management systems name, mounted as
    /// NAMESPACE/NAME/KEY; those of the driver's own namespace as NAME/KEY.
    #[arg(
        long,
        env = "URING_CSI_KMS_SECRETS",
        default_value = "/etc/uring-csi/kms-secrets",
        value_name = "DIR"
    )]
    pub kms_secrets: PathBuf,
    /// The token of this pod's service account, with which it logs in at Vault.
    #[arg(
        long,
        env = "URING_CSI_KMS_TOKEN",
        default_value = "/var/run/secrets/uring-csi/kms/token",
        value_name = "FILE"
    )]
    pub kms_token: PathBuf,
}

/// Parses this process's options; on `--help` or an error prints it and exits.
pub fn parse<T: Parser>() -> T {
    parse_from(std::env::args_os().collect()).unwrap_or_else(|error| error.exit())
}

fn parse_from<T: Parser>(args: Vec<OsString>) -> Result<T, clap::Error> {
    let mut command = T::command();
    // The second parse reports any other error in the arguments.
    let first = T::command()
        .ignore_errors(true)
        .try_get_matches_from(args.clone());
    let file = first.ok().and_then(|matches| {
        matches
            .try_get_one::<PathBuf>("config")
            .ok()
            .flatten()
            .cloned()
    });
    if let Some(path) = file {
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let message = format!("--config: cannot read {}: {error}\n", path.display());
            command.error(ErrorKind::Io, message)
        })?;
        command = with_defaults(command, &text).map_err(|why| {
            T::command().error(
                ErrorKind::InvalidValue,
                format!("--config {}: {why}\n", path.display()),
            )
        })?;
    }
    let matches = command.try_get_matches_from_mut(args)?;
    T::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

fn with_defaults(mut command: Command, text: &str) -> Result<Command, String> {
    let table: toml::Table = text
        .parse()
        .map_err(|error: toml::de::Error| error.to_string())?;
    for (key, value) in table {
        let arg = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(&key) && key != "config")
            .ok_or_else(|| format!("there is no option {key:?}"))?;
        let id = arg.get_id().clone();
        let repeatable = matches!(arg.get_action(), ArgAction::Append);
        let values = match value {
            toml::Value::Array(list) if repeatable => list
                .into_iter()
                .map(|one| scalar(&key, one))
                .collect::<Result<Vec<_>, _>>()?,
            toml::Value::Array(_) => return Err(format!("{key:?} takes one value")),
            one => vec![scalar(&key, one)?],
        };
        command = command.mut_arg(id, |arg| arg.required(false).default_values(values));
    }
    Ok(command)
}

fn scalar(key: &str, value: toml::Value) -> Result<String, String> {
    match value {
        toml::Value::String(text) => Ok(text),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Boolean(flag) => Ok(flag.to_string()),
        other => Err(format!("{key:?} cannot be a {}", other.type_str())),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[derive(Debug, Parser)]
    struct TestOptions {
        #[arg(long)]
        config: Option<PathBuf>,
        #[arg(long)]
        node_id: String,
        #[arg(long)]
        pool: Vec<String>,
        #[arg(long)]
        block_lock: bool,
        #[arg(long, default_value_t = 7)]
        max_volumes: i64,
    }

    fn parse(file: &str, flags: &[&str]) -> Result<TestOptions, clap::Error> {
        let mut written = tempfile::NamedTempFile::new().unwrap();
        written.write_all(file.as_bytes()).unwrap();
        let mut args: Vec<OsString> =
            vec!["agent".into(), "--config".into(), written.path().into()];
        args.extend(flags.iter().map(OsString::from));
        parse_from(args)
    }

    #[test]
    fn flags_override_the_file_and_the_file_overrides_defaults() {
        let file = "node-id = 'a'\npool = ['x=/x', 'y=/y']\nblock-lock = true\nmax-volumes = 3";
        let from_file = parse(file, &[]).unwrap();
        assert_eq!(from_file.node_id, "a");
        assert_eq!(from_file.pool, ["x=/x", "y=/y"]);
        assert!(from_file.block_lock);
        assert_eq!(from_file.max_volumes, 3);
        let both = parse(file, &["--node-id", "b", "--pool", "z=/z"]).unwrap();
        assert_eq!(
            (both.node_id.as_str(), both.pool),
            ("b", vec!["z=/z".to_owned()])
        );
        assert_eq!(parse("node-id = 'a'", &[]).unwrap().max_volumes, 7);
    }

    #[test]
    fn errors_in_the_file_name_the_key() {
        for (file, word) in [
            ("nod-id = 'a'", "nod-id"),
            ("node-id = ['a']", "node-id"),
            ("node-id = 1.5", "node-id"),
            ("config = 'x'", "config"),
            ("max-volumes = 'many'", "max-volumes"),
            ("=", "--config"),
        ] {
            let error = parse(file, &[]).unwrap_err().to_string();
            assert!(error.contains(word), "{file}: {error}");
        }
        assert!(
            parse_from::<TestOptions>(vec!["agent".into(), "--config=/nonexistent".into()])
                .is_err()
        );
    }
}
