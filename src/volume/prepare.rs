//! From a device to a file system that can be mounted: probe, mkfs, fsck.
//!
//! Nothing here may destroy data. mkfs runs only where every region in which
//! any known format keeps a signature reads as zeros, or where the journal says
//! that what stands there is an interrupted mkfs of our own. All that looks at
//! or writes the device opens it exclusively first: what is mounted anywhere,
//! in whatever mount namespace, is neither probed nor formatted.

use std::{io, path::Path, sync::Arc};

use rustix::{fd::AsFd as _, fs::OFlags, io::Errno};

use super::{
    Error, Node,
    record::Record,
    spec::Use,
    task::{Progress, Volume},
};
use crate::{
    device::{
        Attachment, Device, DeviceError, MkfsNote,
        holders::{self, Holder},
        luks, sysfs,
    },
    fs::{
        CommandLine, FsType, fsck, mkfs,
        probe::{self, Content, FsInfo},
    },
    kernel::{block, busy::outwait},
    ring::{child::Child, probe::Prober},
};

/// A file system that is ready to be mounted.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Which one.
    pub fs: FsType,
    /// What its superblock says; `None` where it was made just now.
    pub found: Option<FsInfo>,
}

/// What a probe found, or who was in its way.
enum Probed {
    Content(Content),
    Busy(Vec<Holder>),
}

fn probe_device(prober: &Prober, device: &Device) -> io::Result<Probed> {
    let flags = OFlags::DIRECT | OFlags::EXCL;
    let busy = |error: &io::Error| error.raw_os_error() == Some(Errno::BUSY.raw_os_error());
    let opened = outwait(
        || block::open(&device.node, device.dev, flags),
        |opened| opened.as_ref().is_err_and(busy),
    );
    let file = match opened {
        Ok(file) => file,
        Err(error) if busy(&error) => {
            return Ok(Probed::Busy(holders::holders(device.dev)));
        }
        Err(error) => return Err(error),
    };
    let size = sysfs::size_bytes(device.dev)?;
    let blocks = prober
        .read(file.as_fd(), &probe::regions(size))
        .map_err(io::Error::other)?;
    let content = match (probe::classify(size, &blocks), &device.encrypted) {
        (Content::Unknown { .. }, Some(under)) if is_unwritten(prober, size, under)? => {
            Content::Blank
        }
        (content, _) => content,
    };
    Ok(Probed::Content(content))
}

/// Whether the encrypted device was never written where `size` bytes of it show:
/// its zeros are noise in the clear. LUKS keeps its header before them.
fn is_unwritten(prober: &Prober, size: u64, under: &luks::Node) -> io::Result<bool> {
    let header = sysfs::size_bytes(under.dev)?.checked_sub(size);
    let header = header.ok_or_else(|| io::Error::other("a mapping larger than its device"))?;
    let mut regions = probe::regions(size);
    for region in &mut regions {
        region.offset += header;
    }
    let file = block::open(&under.path, under.dev, OFlags::DIRECT)?;
    let blocks = prober
        .read(file.as_fd(), &regions)
        .map_err(io::Error::other)?;
    let mut bytes = blocks.iter().flat_map(|block| &block.data);
    Ok(bytes.all(|byte| *byte == 0))
}

/// What is on the device. The device is read, nothing else.
pub async fn look(
    node: &Node,
    volume: &Volume,
    device: &Device,
    progress: &Progress,
) -> Result<Content, Error> {
    let (reader, on) = (node.prober.clone(), device.clone());
    let found = node
        .lane(volume, progress, "probe", move || {
            probe_device(&reader, &on)
        })
        .await
        .map_err(volume.io(format!("read {}", device.node.display())))?;
    match found {
        Probed::Content(content) => Ok(content),
        Probed::Busy(holders) => Err(Error::Busy {
            volume: volume.id.clone(),
            device: device.node.clone(),
            holders,
        }),
    }
}

/// Makes sure that a mountable file system is on the device: the one that is
/// there, checked if its superblock says so, or a new one where the device is
/// proven blank.
pub async fn prepare(
    node: &Node,
    volume: &Volume,
    record: &Record,
    attached: &Attachment,
    mkfs_options: &[String],
    progress: &Progress,
) -> Result<Prepared, Error> {
    let Use::Mount { fs: wanted, .. } = record.usage else {
        unreachable!("only mounted volumes are prepared");
    };
    let device = &attached.device;
    let content = look(node, volume, device, progress).await?;
    not_cut_short(volume, record, device, &content)?;
    let info = match content {
        Content::Fs(info) if wanted.is_none_or(|wanted| wanted == info.fs) => info,
        other => {
            let blank = matches!(other, Content::Blank);
            // A note outweighs nothing that a mkfs does not leave.
            let scrap = other.is_scrap()
                && noted(node, volume, attached, progress, |note, id| {
                    note.was_interrupted(id)
                })
                .await?;
            if !blank && !scrap {
                return Err(Error::Foreign {
                    volume: volume.id.clone(),
                    device: device.node.clone(),
                    what: describe(&other),
                    wanted: wanted.map_or("a file system", FsType::as_str),
                });
            }
            if record.read_only {
                return Err(volume.precondition(format!(
                    "{} holds {} and cannot be formatted read-only; stage it writable once",
                    device.node.display(),
                    describe(&other),
                )));
            }
            if !blank {
                tracing::warn!(volume_id = volume.id, device = %device.node.display(), "a mkfs of this volume was interrupted; it is made again");
            }
            let fs = wanted.unwrap_or(FsType::Ext4);
            make(node, volume, record, attached, fs, mkfs_options, progress).await?;
            return Ok(Prepared { fs, found: None });
        }
    };
    if !record.read_only {
        // It may have been finished by an agent that died before it said so.
        noted(node, volume, attached, progress, |note, _| note.ended()).await?;
        if info.dirty {
            check(volume, device, info.fs, progress).await?;
        }
    }
    Ok(Prepared {
        fs: info.fs,
        found: Some(info),
    })
}

/// fsck, and at times the mount, would mend a file system that has lost its end
/// by giving up what was there.
fn not_cut_short(
    volume: &Volume,
    record: &Record,
    device: &Device,
    content: &Content,
) -> Result<(), Error> {
    let Content::Fs(info) = content else {
        return Ok(());
    };
    let has = sysfs::size_bytes(device.dev).map_err(volume.io("read the device's size"))?;
    if info.bytes <= has {
        return Ok(());
    }
    Err(volume.precondition(format!(
        "{} has {has} bytes, less than the {} of the {} on it: it was cut short; make it as large again, or restore its data",
        record.source,
        info.bytes,
        info.fs.as_str(),
    )))
}

/// Asks or changes the note of a mkfs that is under way.
async fn noted<T: Send + 'static>(
    node: &Node,
    volume: &Volume,
    attached: &Attachment,
    progress: &Progress,
    what: impl FnOnce(&MkfsNote, &str) -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, Error> {
    let (making, id) = (Arc::clone(&attached.note), volume.id.clone());
    node.lane(volume, progress, "note", move || what(&making, &id))
        .await
        .map_err(|error| volume.device(error))
}

/// What a probe found, in words.
pub fn describe(content: &Content) -> String {
    match content {
        Content::Blank => "nothing".to_owned(),
        Content::Fs(info) => format!("{} with data", info.fs.as_str()),
        Content::Foreign { what } => (*what).to_owned(),
        Content::Unknown { offset } => format!("unknown data at byte {offset}"),
    }
}

/// Makes a file system, with a durable note around it that it is ours.
pub async fn make(
    node: &Node,
    volume: &Volume,
    record: &Record,
    attached: &Attachment,
    fs: FsType,
    options: &[String],
    progress: &Progress,
) -> Result<(), Error> {
    let backends = Arc::clone(&node.backends);
    let source = record.source.clone();
    let zeros = noted(node, volume, attached, progress, move |note, id| {
        let zeros = backends.bind(&source).reads_as_zero()?;
        note.begins(id)?;
        Ok(zeros)
    })
    .await?;
    let device = &attached.device;
    let command = mkfs::command(fs, &device.node, options, zeros);
    let program = command.program;
    let exit = run_child(volume, progress, "mkfs", &command).await?;
    if !exit.success() {
        return Err(Error::Mkfs {
            volume: volume.id.clone(),
            device: device.node.clone(),
            program,
            status: exit.describe(),
            may_pass: exit.code.is_none() || exit.output.contains("Input/output error"),
            output: exit.output.trim().to_owned(),
        });
    }
    // From now on the source may hold data.
    noted(node, volume, attached, progress, |note, _| note.ended()).await
}

async fn check(
    volume: &Volume,
    device: &Device,
    fs: FsType,
    progress: &Progress,
) -> Result<(), Error> {
    let Some(command) = fsck::command(fs, &device.node) else {
        return Err(volume.precondition(format!(
            "the {fs} on {} is marked as damaged; repair it by hand ({fs}'s own repair program) while it is not mounted",
            device.node.display()
        )));
    };
    let exit = run_child(volume, progress, "fsck", &command).await?;
    fsck::judge(fs, exit.code, &exit.output)
        .map(|fixed| {
            tracing::info!(volume_id = volume.id, device = %device.node.display(), ?fixed, "checked a file system that was not unmounted cleanly");
        })
        .map_err(|source| Error::Fsck {
            volume: volume.id.clone(),
            device: device.node.clone(),
            source,
        })
}

async fn run_child(
    volume: &Volume,
    progress: &Progress,
    step: &'static str,
    command: &CommandLine,
) -> Result<crate::ring::child::Exit, Error> {
    progress
        .step(step, async {
            let child = Child::spawn(command.program, &command.args)?;
            progress.waits_for(format!("{}, process {}", command.program, child.pid()));
            child.wait().await
        })
        .await
        .map_err(volume.io(format!("run {}", Path::new(command.program).display())))
}
