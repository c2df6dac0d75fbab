use super::*;
use crate::{
    capability::AccessMode,
    device::{ImageSource, Source},
    mount::options::MountOptions,
    volume::record::Phase,
};

fn record(fs: Option<FsType>, usage: Use) -> Record {
    Record {
        volume_id: "v".to_owned(),
        name: String::new(),
        boot_id: "boot".to_owned(),
        phase: Phase::Staged,
        source: Source::Loop(ImageSource::new("main", "v.img")),
        staging_path: "/staging".into(),
        usage,
        fs,
        read_only: false,
        mode: AccessMode::SingleNodeWriter,
        device: None,
        root_dev: None,
        root_ino: None,
        inline: None,
        found: false,
    }
}

fn mounted(fs: FsType, flags: &[&str]) -> Record {
    let options = MountOptions::parse(flags).unwrap();
    record(Some(fs), Use::Mount { fs: None, options })
}

#[test]
fn the_runtime_thread_asks_only_file_systems_that_read_nothing() {
    assert!(never_waits(&record(None, Use::Block)));
    assert!(never_waits(&mounted(FsType::Ext4, &["noatime,discard"])));
    assert!(never_waits(&mounted(FsType::Btrfs, &[])));
    assert!(!never_waits(&mounted(FsType::Xfs, &[])));
    for quota in ["prjquota", "usrquota", "usrjquota=aquota.user,jqfmt=vfsv1"] {
        assert!(!never_waits(&mounted(FsType::Ext4, &[quota])), "{quota}");
    }
    for fs in [FsType::Ext4, FsType::Btrfs] {
        let found = Record {
            found: true,
            ..mounted(fs, &[])
        };
        assert!(!never_waits(&found), "{fs:?}");
    }
    // A directory of a server.
    let remote = Record {
        fs: None,
        ..mounted(FsType::Ext4, &[])
    };
    assert!(!never_waits(&remote));
}
