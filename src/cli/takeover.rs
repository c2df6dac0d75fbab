//! `takeover`: which volumes of ceph-csi the node agent would recover on this node.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
};

use clap::Args;
use rustix::process::geteuid;
use serde::Serialize;

use super::{
    answer::{Answer, table},
    error::CliError,
};
use crate::{
    device::{DeviceServer, ForeignDevice, Owner},
    mount::path::Roots,
    volume::takeover::{StagedVolume, staged},
};

/// Shows which of ceph-csi's volumes on this node the node agent would recover
#[derive(Args, Debug)]
#[command(after_help = "\
Looks as the node agent does at its start, needs no agent, and changes nothing. Run it as
root on the node, while ceph-csi serves it. The states:

  recovers  the agent recovers the volume, and pods run on
  drain     it recovers the volume, but I/O waits once ceph-csi's rbd-nbd has ended
  refused   it does not recover the volume, for the reason shown
  unstaged  a mapped image without a stage file: its volume's next stage finds it
  own       an agent of this driver has attached the device

Example:
  uringctl takeover --dry-run")]
pub struct Takeover {
    /// Only look: the agent itself recovers volumes, at its start
    #[arg(long, required = true)]
    dry_run: bool,
    /// Kubelet's directory
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
}

/// The volumes of another driver, and mapped images without a volume.
#[derive(Debug, Serialize)]
pub struct TakeoverAnswer {
    volumes: Vec<Candidate>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Candidate {
    /// Empty where no stage file names the volume.
    volume_id: String,
    staging_path: String,
    image: String,
    device: String,
    state: &'static str,
    /// Empty where the volume is recovered.
    why: String,
}

impl Takeover {
    /// Runs the command.
    pub fn run(&self) -> Result<TakeoverAnswer, CliError> {
        let failed = |source| CliError::Io {
            doing: "look for volumes below",
            path: self.kubelet_dir.clone(),
            source,
        };
        if !geteuid().is_root() {
            let why = "only root can read all of them: run the command as root";
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        let roots = Roots::new(std::slice::from_ref(&self.kubelet_dir));
        let roots = roots.map_err(|error| failed(io::Error::other(error)))?;
        let volumes = staged(roots).map_err(failed)?;
        let mapped = ForeignDevice::mapped().map_err(failed)?;
        let found: HashSet<_> = (volumes.iter())
            .flat_map(|volume| {
                volume
                    .device
                    .as_ref()
                    .map(|device| device.mapped_as.clone())
            })
            .collect();
        let unstaged = mapped.into_iter().filter(|(_, node)| !found.contains(node));
        let unstaged = unstaged.map(|(image, node)| Candidate::unstaged(image, &node));
        let staged = volumes.into_iter().map(Candidate::staged);
        Ok(TakeoverAnswer {
            volumes: staged.chain(unstaged).collect(),
        })
    }
}

impl Candidate {
    fn staged(volume: StagedVolume) -> Self {
        let (image, device, state, why) = match volume.device {
            Err(why) => (String::new(), String::new(), "refused", why),
            Ok(device) => {
                let (state, why) = verdict(&device);
                let node = device.node.display().to_string();
                (device.image, node, state, why)
            }
        };
        Self {
            volume_id: volume.volume_id,
            staging_path: volume.staging_path.display().to_string(),
            image,
            device,
            state,
            why,
        }
    }

    fn unstaged(image: String, node: &Path) -> Self {
        Self {
            volume_id: String::new(),
            staging_path: String::new(),
            image,
            device: node.display().to_string(),
            state: "unstaged",
            why: "no mount of it below kubelet's directory has a stage file beside it".to_owned(),
        }
    }
}

fn verdict(device: &ForeignDevice) -> (&'static str, String) {
    match (device.server, &device.owner) {
        (DeviceServer::Process(pid), _) => {
            let why = format!(
                "rbd-nbd, process {pid}, serves it: unless uring-csi-holder started that, it ends with the pod that did, so drain the volume's pods first"
            );
            ("drain", why)
        }
        (DeviceServer::Nothing, _) => {
            let why = "its rbd-nbd has ended, so its I/O waits: with uring-csi-holder the next stage starts another";
            ("drain", why.to_owned())
        }
        (DeviceServer::Kernel, Owner::Volume(_)) => ("own", String::new()),
        (DeviceServer::Kernel, _) => ("recovers", String::new()),
    }
}

impl Answer for TakeoverAnswer {
    fn text(&self) -> String {
        let rows = self.volumes.iter().map(|volume| {
            [
                volume.state.to_owned(),
                volume.volume_id.clone(),
                volume.image.clone(),
                volume.device.clone(),
                volume.why.clone(),
            ]
        });
        let header = ["STATE", "VOLUME", "IMAGE", "DEVICE", "WHY"];
        table(header, rows, "ceph-csi has no volumes on this node")
    }
}

#[cfg(test)]
mod tests {
    use rustix::{process::Uid, thread::set_thread_res_uid};

    use super::*;

    #[test]
    fn another_user_than_root_is_refused() {
        let refused = std::thread::spawn(|| {
            let nobody = Uid::from_raw(65534);
            // Of this thread alone.
            set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let kubelet_dir = "/".into();
            let dry_run = true;
            Takeover {
                dry_run,
                kubelet_dir,
            }
            .run()
        });
        let CliError::Io { source, .. } = refused.join().unwrap().unwrap_err() else {
            panic!("not refused at once");
        };
        assert!(source.to_string().contains("as root"), "{source}");
    }

    #[test]
    fn what_ends_with_the_other_driver_is_to_be_drained() {
        let device = |server, owner| ForeignDevice {
            node: "/dev/nbd0".into(),
            mapped_as: "/dev/nbd0".into(),
            image: "image rbd/one".to_owned(),
            owner,
            server,
        };
        let own = || Owner::Volume("handle".to_owned());
        let state = |server, owner| verdict(&device(server, owner));
        assert_eq!(state(DeviceServer::Kernel, Owner::None).0, "recovers");
        assert_eq!(state(DeviceServer::Kernel, own()).0, "own");
        let (state, why) = state(DeviceServer::Process(42), own());
        assert!(state == "drain" && why.contains("process 42"), "{why}");
    }
}
