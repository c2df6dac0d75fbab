//! The allow-list of superblock options.
//!
//! The options come from a StorageClass or a PersistentVolume. An option is allowed if
//! it affects only this mount of the volume's own file system: it names no other device
//! and no file, and does not turn an error of the file system into a failure of the node.
//! To allow another, look it up in the kernel's source: `ext4_param_specs`,
//! `xfs_fs_parameters`, `btrfs_fs_parameters`, `nfs_fs_parameters`.
//!
//! In the lists `#` means digits and perhaps a unit, `%` a word without a slash, and
//! brackets a value that may be left out.

use super::{FsOption, LABELS, MountOptionError, MountOptions};

/// Options of any file system: those of `vfs_parse_sb_flag` and of security modules.
const ANY: &[&str] = &[
    "async",
    "context=%",
    "defcontext=%",
    "dirsync",
    "fscontext=%",
    "iversion",
    "lazytime",
    "mand",
    "noiversion",
    "nolazytime",
    "nomand",
    "rootcontext=%",
    "sync",
];

const EXT4: &[&str] = &[
    "acl",
    "auto_da_alloc[=#]",
    "barrier[=#]",
    "bh",
    "block_validity",
    "bsddf",
    "bsdgroups",
    "commit=#",
    "data=journal|ordered|writeback",
    "data_err=abort|ignore",
    "delalloc",
    "dioread_lock",
    "dioread_nolock",
    "discard",
    "errors=continue|remount-ro",
    "grpid",
    "grpjquota=%",
    "grpquota",
    "i_version",
    "init_itable[=#]",
    "inlinecrypt",
    "inode_readahead_blks=#",
    "journal_async_commit",
    "journal_checksum",
    "journal_ioprio=#",
    "jqfmt=vfsold|vfsv0|vfsv1",
    "max_batch_time=#",
    "max_dir_size_kb=#",
    "mb_optimize_scan=#",
    "mblk_io_submit",
    "min_batch_time=#",
    "minixdf",
    "no_prefetch_block_bitmaps",
    "noacl",
    "noauto_da_alloc",
    "nobarrier",
    "nobh",
    "noblock_validity",
    "nodelalloc",
    "nodioread_nolock",
    "nodiscard",
    "nogrpid",
    "noinit_itable",
    "nojournal_checksum",
    "noload",
    "nombcache",
    "nomblk_io_submit",
    "noquota",
    "norecovery",
    "nouid32",
    "nouser_xattr",
    "nowarn_on_error",
    "oldalloc",
    "orlov",
    "prefetch_block_bitmaps",
    "prjquota",
    "quota",
    "resgid=#",
    "resuid=#",
    "stripe=#",
    "sysvgroups",
    "user_xattr",
    "usrjquota=%",
    "usrquota",
    "warn_on_error",
];

const XFS: &[&str] = &[
    "allocsize=#",
    "attr2",
    "barrier",
    "bsdgroups",
    "discard",
    "filestreams",
    "gqnoenforce",
    "gquota",
    "grpid",
    "grpquota",
    "ikeep",
    "inode32",
    "inode64",
    "largeio",
    "lifetime",
    "logbsize=#",
    "logbufs=#",
    "noalign",
    "noattr2",
    "nobarrier",
    "nodiscard",
    "nogrpid",
    "noikeep",
    "nolargeio",
    "nolifetime",
    "noquota",
    "norecovery",
    "nouuid",
    "pqnoenforce",
    "pquota",
    "prjquota",
    "qnoenforce",
    "quota",
    "sunit=#",
    "swalloc",
    "swidth=#",
    "sysvgroups",
    "uqnoenforce",
    "uquota",
    "usrquota",
    "wsync",
];

const BTRFS: &[&str] = &[
    "acl",
    "autodefrag",
    "barrier",
    "clear_cache",
    "commit=#",
    "compress[=lzo|no|none|zlib|zlib:#|zstd|zstd:#]",
    "compress-force[=lzo|no|none|zlib|zlib:#|zstd|zstd:#]",
    "datacow",
    "datasum",
    "discard[=async|sync]",
    "flushoncommit",
    "max_inline=#",
    "metadata_ratio=#",
    "noacl",
    "noautodefrag",
    "nobarrier",
    "nodatacow",
    "nodatasum",
    "nodiscard",
    "noflushoncommit",
    "nologreplay",
    "nospace_cache",
    "nossd",
    "nossd_spread",
    "notreelog",
    "rescan_uuid_tree",
    "skip_balance",
    "space_cache[=v1|v2]",
    "ssd",
    "ssd_spread",
    "thread_pool=#",
    "treelog",
    "user_subvol_rm_allowed",
];

const NFS: &[&str] = &[
    "ac",
    "acdirmax=#",
    "acdirmin=#",
    "acl",
    "acregmax=#",
    "acregmin=#",
    "actimeo=#",
    "cto",
    "hard",
    "intr",
    "local_lock=all|flock|none|posix",
    "lock",
    "lookupcache=all|none|pos|positive",
    "max_connect=#",
    "minorversion=#",
    "mountport=#",
    "mountproto=tcp|tcp6|udp|udp6",
    "mountvers=#",
    "nconnect=#",
    "nfsvers=3|4|4.0|4.1|4.2",
    "noac",
    "noacl",
    "nocto",
    "nointr",
    "nolock",
    "nordirplus",
    "noresvport",
    "nosharecache",
    "nosoftreval",
    "notrunkdiscovery",
    "port=#",
    "proto=rdma|tcp|tcp6|udp|udp6",
    "rdirplus",
    "rdma",
    "resvport",
    "retrans=#",
    "rsize=#",
    "sec=krb5|krb5i|krb5p|none|sys",
    "sharecache",
    "soft",
    "softerr",
    "softreval",
    "tcp",
    "timeo=#",
    "trunkdiscovery",
    "udp",
    "vers=3|4|4.0|4.1|4.2",
    "write=eager|lazy|wait",
    "wsize=#",
    "xprtsec=mtls|none|tls",
];

/// The options of NFS for inline volumes, which any author of a pod can set. They affect this
/// mount alone. None chooses a port, a transport or an identity: the client would find another
/// server at the address, or send other credentials; none changes the timeouts or the number
/// of the connections, which the node's other volumes of the server share.
const NFS_OF_PODS: &[&str] = &[
    "ac",
    "acdirmax=#",
    "acdirmin=#",
    "acregmax=#",
    "acregmin=#",
    "actimeo=#",
    "async",
    "cto",
    "hard",
    "local_lock=all|flock|none|posix",
    "lock",
    "lookupcache=all|none|pos|positive",
    "nfsvers=3|4|4.0|4.1|4.2",
    "noac",
    "nocto",
    "nolock",
    "nordirplus",
    "rdirplus",
    "rsize=#",
    "soft",
    "softerr",
    "sync",
    "vers=3|4|4.0|4.1|4.2",
    "wsize=#",
    "xprtsec=mtls|tls",
];

/// Whether an author of a pod may set the option for an inline volume of this file system.
pub(super) fn is_for_pods(fs: Option<&str>, option: &FsOption) -> bool {
    match fs {
        Some("nfs") => NFS_OF_PODS.iter().any(|pattern| admits(pattern, option)),
        _ => !LABELS.contains(&option.key.as_str()),
    }
}

/// Whether the option is left out where an author of a pod sets it for an inline volume. An
/// example of csi-driver-nfs has `sec=sys`, which no export needs: without it the client and the
/// server agree on what the export requires. With it they would agree on less, where the export
/// allows that.
pub(super) fn is_left_out_for_pods(fs: Option<&str>, option: &FsOption) -> bool {
    fs == Some("nfs") && option.key == "sec" && option.value.as_deref() == Some("sys")
}

/// The file systems on a block device.
const ON_DEVICES: [(&str, &[&str]); 3] = [("ext4", EXT4), ("xfs", XFS), ("btrfs", BTRFS)];

/// Options that are refused with a reason of their own, as patterns.
const REFUSED: &[(&str, &str)] = &[
    ("abort", "it shuts the file system down"),
    ("addr", SERVER),
    ("clientaddr", SERVER),
    ("degraded", "a volume is one device"),
    ("device", ELSEWHERE),
    (
        "errors",
        "it may be continue or remount-ro; an error must not halt the node",
    ),
    ("fatal_errors", "an error must not halt the node"),
    ("journal_dev", ELSEWHERE),
    ("journal_path", ELSEWHERE),
    ("logdev", ELSEWHERE),
    ("mountaddr", SERVER),
    ("mounthost", SERVER),
    ("rtdev", ELSEWHERE),
    (
        "sb",
        "it reads another superblock than the one that was checked",
    ),
    ("subvol", PART),
    ("subvolid", PART),
];

const SERVER: &str = "the volume names its server";
const ELSEWHERE: &str = "it names another device of the node";
const PART: &str = "a volume is mounted at its file system's root";

impl MountOptions {
    /// Refuses each option of the superblock that is not allowed for this file system, or,
    /// while the file system is unknown (`None`), for none of those on block devices.
    pub fn refuse_unlisted(&self, fs: Option<&str>) -> Result<(), MountOptionError> {
        self.fs_options().try_for_each(|option| {
            let remote = [("nfs", NFS)];
            let of_fs = (ON_DEVICES.iter())
                .filter(|(name, _)| fs.is_none_or(|fs| fs == *name))
                .chain(remote.iter().filter(|(name, _)| fs == Some(*name)))
                .flat_map(|(_, list)| *list);
            if ANY
                .iter()
                .chain(of_fs)
                .any(|pattern| admits(pattern, option))
            {
                return Ok(());
            }
            let named = option.to_string();
            Err(match REFUSED.iter().find(|(key, _)| *key == option.key) {
                Some((_, why)) => MountOptionError::Refused { option: named, why },
                None => MountOptionError::Unlisted {
                    option: named,
                    fs: fs.unwrap_or("any file system").to_owned(),
                },
            })
        })
    }
}

/// Whether an entry of a list allows the option.
fn admits(pattern: &str, option: &FsOption) -> bool {
    let (key, values) = match pattern.split_once('=') {
        Some((key, values)) => (key, Some(values)),
        None => (pattern, None),
    };
    let (key, optional) = match key.strip_suffix('[') {
        Some(key) => (key, true),
        None => (key, false),
    };
    let values = values.map(|values| values.strip_suffix(']').unwrap_or(values));
    key == option.key
        && match (values, option.value.as_deref()) {
            (None, None) => true,
            (Some(_), None) => optional,
            (None, Some(_)) => false,
            (Some(forms), Some(value)) => forms.split('|').any(|form| is_of(form, value)),
        }
}

fn is_of(form: &str, value: &str) -> bool {
    if form == "%" {
        let inside = |b: u8| b.is_ascii_alphanumeric() || b"_-.:,".contains(&b);
        return !value.is_empty() && !value.starts_with('.') && value.bytes().all(inside);
    }
    let Some(head) = form.strip_suffix('#') else {
        return value == form;
    };
    value.strip_prefix(head).is_some_and(|number| {
        let digits = number.strip_suffix(|unit: char| "kKmMgG".contains(unit));
        let digits = digits.unwrap_or(number);
        (1..=20).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
    })
}
