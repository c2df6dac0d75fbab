//! From a device to a file system that can be mounted: probe, mkfs, fsck.
//!
//! Nothing here may destroy data. mkfs runs only where every region in which
//! any known format keeps a signature reads as zeros, or where a format
//! marker says that the device holds a partial format of our own. Every step that reads
//! or writes the device opens it exclusively first: a device that is mounted in any mount
//! namespace is neither probed nor formatted.

use std::{io, os::fd::OwnedFd, path::Path, pin::pin};

use rustix::{fd::AsFd, fs::OFlags};

use super::{context::OnLane, error::Cause, record::Record, spec::Use};
use crate::{
    device::{Attachment, Device, DeviceError, FormatMarker, HeldOpen, Source, luks, openers},
    error_chain,
    fs::{
        CommandLine, FsType,
        fsck::{self, FsckError, FsckOutcome},
        mkfs,
        probe::{self, Content, FsInfo},
        reports_busy,
    },
    kernel::{
        block::{self, BlockDev},
        exec, sysfs,
    },
    observe::metrics,
    ring::{
        child::{Child, Exit},
        probe::Prober,
    },
};

/// A file system that is ready to be mounted.
#[derive(Clone, Debug)]
pub(super) struct Prepared {
    /// Its type.
    pub fs: FsType,
    /// Its superblock; `None` if it was made just now.
    pub found: Option<FsInfo>,
    /// The device's size in bytes.
    pub device_bytes: u64,
}

/// A device that is held open. Closing it is a step: it may block.
pub(super) struct OpenDevice<'a> {
    cx: OnLane<'a>,
    held: Option<HeldOpen>,
    /// Its size in bytes.
    bytes: u64,
}

impl OpenDevice<'_> {
    /// See [`HeldOpen::check`].
    pub fn check(&self) -> Result<(), DeviceError> {
        self.held.as_ref().map_or(Ok(()), HeldOpen::check)
    }
}

impl Drop for OpenDevice<'_> {
    fn drop(&mut self) {
        self.cx.step("close", || drop(self.held.take()));
    }
}

/// The content of the device, which may be open exclusively already, and its size in bytes;
/// `None` if it is in use.
fn content_of(
    prober: &Prober,
    device: &Device,
    exclusive: Option<OwnedFd>,
) -> io::Result<Option<(Content, u64)>> {
    let open = || block::open_exclusive(&device.node, device.dev, OFlags::DIRECT);
    let file = match exclusive.map_or_else(open, Ok) {
        Ok(file) => file,
        Err(error) if block::is_busy(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let size = block::size_bytes(&file)?;
    let blocks = prober
        .read(file.as_fd(), &probe::regions(size))
        .map_err(io::Error::other)?;
    let content = match (probe::classify(size, &blocks), &device.encrypted) {
        (Content::Unknown { .. }, Some(under)) if is_unwritten(prober, size, under)? => {
            Content::Blank
        }
        (content, _) => content,
    };
    Ok(Some((content, size)))
}

/// Whether the encrypted device was never written where `size` bytes of it show:
/// its zeros are noise in the clear. The encryption's header stands before them.
///
/// The sizes of the two devices do not tell where: the lower one may have grown since the
/// mapping was opened, and what it has gained is all zeros.
fn is_unwritten(prober: &Prober, size: u64, under: &BlockDev) -> io::Result<bool> {
    let Some(begins) = luks::data_offset(under).map_err(io::Error::other)? else {
        return Ok(false);
    };
    let mut regions = probe::regions(size);
    for region in &mut regions {
        region.offset += begins;
    }
    let file = block::open(&under.node, under.dev, OFlags::DIRECT)?;
    let blocks = prober
        .read(file.as_fd(), &regions)
        .map_err(io::Error::other)?;
    let mut bytes = blocks.iter().flat_map(|block| &block.data);
    Ok(bytes.all(|byte| *byte == 0))
}

/// Reads the content of the device, which is held open from now on, and changes nothing.
pub(super) async fn look<'a>(
    cx: OnLane<'a>,
    source: &Source,
    device: &Device,
    exclusive: Option<OwnedFd>,
) -> Result<(Content, OpenDevice<'a>), Cause> {
    let _admission = cx.admit(&cx.node.config.gates.probe, source).await?;
    cx.step("probe", || {
        let attached = exclusive.as_ref().map(AsFd::as_fd);
        let mut held = OpenDevice {
            cx,
            held: Some(HeldOpen::new(source, device, attached)?),
            bytes: 0,
        };
        let failed = Cause::io(format!("read {}", device.node.display()));
        if let Some((content, bytes)) =
            content_of(&cx.node.prober, device, exclusive).map_err(failed)?
        {
            held.bytes = bytes;
            return Ok((content, held));
        }
        drop(held);
        Err(Cause::Busy {
            device: device.node.clone(),
            openers: openers::openers(device.dev),
        })
    })
}

/// How often mkfs or fsck may find the device busy that was not busy for us just
/// before.
const BUSY_TRIES: u32 = 10;

/// Makes sure that a mountable file system is on the device: the one that is
/// there, checked if its superblock says so, or a new one where the device is
/// proven blank. From the look at it on, the device is held open.
///
/// If mkfs or fsck finds the device busy, all of this begins again: the opener that kept
/// the device busy for a moment (see [`crate::kernel::busy`]) may have written to it.
pub(super) async fn prepare<'a>(
    cx: OnLane<'a>,
    record: &Record,
    attached: &Attachment,
    mut exclusive: Option<OwnedFd>,
    mkfs_options: &[String],
) -> Result<(Prepared, OpenDevice<'a>), Cause> {
    let (source, device) = (&record.source, &attached.device);
    let mut tries = 0;
    loop {
        tries += 1;
        let (content, held) = look(cx, source, device, exclusive.take()).await?;
        let preparing = Preparing {
            cx,
            record,
            attached,
            held: &held,
        };
        let error = match preparing.from(content, mkfs_options).await {
            Ok(prepared) => return Ok((prepared, held)),
            Err(error) => error,
        };
        if !matches!(error, Cause::Busy { .. }) || tries == BUSY_TRIES {
            return Err(error);
        }
    }
}

/// A device on which a file system is found or made.
#[derive(Clone, Copy)]
pub(super) struct Preparing<'a> {
    pub cx: OnLane<'a>,
    pub record: &'a Record,
    /// Its device.
    pub attached: &'a Attachment,
    /// Its descriptor, by which it is held open.
    pub held: &'a OpenDevice<'a>,
}

impl Preparing<'_> {
    async fn from(self, content: Content, mkfs_options: &[String]) -> Result<Prepared, Cause> {
        let Self {
            cx,
            record,
            attached,
            ..
        } = self;
        let Use::Mount { fs: wanted, .. } = record.usage else {
            unreachable!("only mounted volumes are prepared");
        };
        let device = &attached.device;
        let device_bytes = self.held.bytes;
        not_cut_short(record, device_bytes, &content)?;
        let info = match content {
            Content::Fs(info) if wanted.is_none_or(|wanted| wanted == info.fs) => info,
            other => {
                let blank = matches!(other, Content::Blank);
                // A format marker is trusted only for content that a mkfs leaves.
                let scrap = other.is_partial_format()
                    && self.marked(<dyn FormatMarker>::format_in_progress)?;
                if !blank && !scrap {
                    metrics::mkfs("refused");
                    return Err(Cause::Foreign {
                        device: device.node.clone(),
                        what: describe(&other),
                        wanted: wanted.map_or("a file system", FsType::as_str),
                    });
                }
                if record.read_only {
                    return Err(Cause::precondition(format!(
                        "{} holds {} and cannot be formatted read-only; stage it writable once",
                        device.node.display(),
                        describe(&other),
                    )));
                }
                if !blank {
                    tracing::warn!(volume_id = cx.volume.id, device = %device.node.display(), "repeating an interrupted mkfs");
                }
                let fs = wanted.unwrap_or(FsType::Ext4);
                self.make(fs, mkfs_options).await?;
                return Ok(Prepared {
                    fs,
                    found: None,
                    device_bytes,
                });
            }
        };
        if !record.read_only {
            // An agent may have finished it, and died before it removed the marker.
            self.marked(|marker, _| marker.clear())?;
            if info.dirty {
                self.held.check()?;
                self.check(info.fs).await?;
            }
        }
        Ok(Prepared {
            fs: info.fs,
            found: Some(info),
            device_bytes,
        })
    }

    /// Reads or changes the format marker.
    fn marked<T>(
        self,
        what: impl FnOnce(&(dyn FormatMarker + 'static), &str) -> Result<T, DeviceError>,
    ) -> Result<T, Cause> {
        let cx = self.cx;
        let work = || what(&*self.attached.format_marker, &cx.volume.id);
        Ok(cx.step("note", work)?)
    }

    /// Runs mkfs or fsck, which refuse a device that is in use before they write. What the
    /// exit means decides whether the step failed.
    async fn run<T>(
        self,
        command: &CommandLine,
        run: Run,
        meaning: impl FnOnce(Exit) -> Result<T, Cause>,
    ) -> Result<T, Cause> {
        let meaning = |exit: Exit| {
            if !exit.success() && reports_busy(&exit.output) {
                return Err(Cause::Busy {
                    device: self.attached.device.node.clone(),
                    openers: Vec::new(),
                });
            }
            meaning(exit)
        };
        run_child(self.cx, &self.record.source, command, run, meaning).await
    }

    /// Makes a file system, with a durable format marker around it.
    pub async fn make(self, fs: FsType, options: &[String]) -> Result<(), Cause> {
        if let Some(command) = mkfs::release_command(fs) {
            let told = self.run(&command, Run::Mkfs, |exit| Ok(exit.output));
            mkfs::note_release(command.program, &told.await?);
        }
        let zeros = self.marked(|marker, id| {
            let bound = self.cx.node.backends.bind(&self.record.source);
            let zeros = bound.reads_as_zero()?;
            marker.set(id)?;
            if let Err(error) = self.held.check() {
                // It did not begin.
                marker.clear()?;
                return Err(error);
            }
            Ok(zeros)
        })?;
        let device = &self.attached.device;
        let encrypts_files = self.record.source.encrypted_directory().is_some();
        let command = mkfs::command(fs, &device.node, options, zeros, encrypts_files);
        let made = self.run(&command, Run::Mkfs, |exit| {
            self.made(fs, command.program, &exit)
        });
        let made = made.await;
        // After Busy all begins again.
        if !matches!(made, Err(Cause::Busy { .. })) {
            metrics::mkfs(if made.is_ok() { "formatted" } else { "failed" });
        }
        if let Err(error) = made {
            self.clear_marker_if_blank().await;
            return Err(error);
        }
        // From now on the source may hold data.
        self.marked(|marker, _| marker.clear())
    }

    /// After a mkfs that failed: where it wrote nothing, its marker would vouch for whatever
    /// is written there later.
    async fn clear_marker_if_blank(self) {
        let (cx, device) = (self.cx, &self.attached.device);
        let Ok(_admission) = cx
            .admit(&cx.node.config.gates.probe, &self.record.source)
            .await
        else {
            return;
        };
        let is_blank = cx.step("probe", || {
            self.held.check().is_ok()
                && matches!(
                    content_of(&cx.node.prober, device, None),
                    Ok(Some((Content::Blank, _)))
                )
        });
        if is_blank && let Err(cause) = self.marked(|marker, _| marker.clear()) {
            let error = error_chain(&cause);
            tracing::warn!(
                volume_id = cx.volume.id,
                error,
                "cannot clear the format marker of a mkfs that failed"
            );
        }
    }

    /// What the exit of mkfs means.
    fn made(self, fs: FsType, program: &'static str, exit: &Exit) -> Result<(), Cause> {
        let device = &self.attached.device;
        if !exit.success() {
            let has = sysfs::size_bytes(device.dev).map_err(Cause::io("read the device's size"))?;
            let is_too_big = || {
                ["Size of device", "too big"]
                    .iter()
                    .all(|it| exit.output.contains(it))
            };
            let misfit = if has < fs.least_bytes() {
                Some(format!(
                    "too few for {fs}, which needs {}",
                    fs.least_bytes()
                ))
            } else {
                is_too_big().then(|| format!("too many for {fs}"))
            };
            if let Some(misfit) = misfit {
                return Err(Cause::precondition(format!(
                    "{} has {has} bytes, {misfit}: {}",
                    self.record.source,
                    mkfs::message(&exit.output),
                )));
            }
            return Err(Cause::Mkfs {
                device: device.node.clone(),
                program,
                status: exit.describe(),
                may_pass: exit.code.is_none() || exit.output.contains("Input/output error"),
                output: mkfs::message(&exit.output).to_owned(),
            });
        }
        Ok(())
    }

    async fn check(self, fs: FsType) -> Result<(), Cause> {
        let (cx, device) = (self.cx, &self.attached.device);
        let Some(command) = fsck::command(fs, &device.node) else {
            return Err(Cause::precondition(format!(
                "the {fs} on {} is marked as damaged; repair it by hand ({fs}'s own repair program) while it is not mounted",
                device.node.display()
            )));
        };
        let checked = self.run(&command, Run::Fsck, |exit| {
            fsck::interpret(fs, exit.code, &exit.output).map_err(|source| Cause::Fsck {
                device: device.node.clone(),
                source,
            })
        });
        let checked = checked.await;
        match &checked {
            Ok(FsckOutcome::Clean) => metrics::fsck("clean"),
            Ok(FsckOutcome::Repaired) => metrics::fsck("repaired"),
            Err(Cause::Fsck {
                source: FsckError::Uncorrected { .. },
                ..
            }) => metrics::fsck("uncorrected"),
            // All begins again.
            Err(Cause::Busy { .. }) => {}
            Err(_) => metrics::fsck("failed"),
        }
        let fixed = checked?;
        tracing::info!(volume_id = cx.volume.id, device = %device.node.display(), ?fixed, "checked a file system that was not unmounted cleanly");
        Ok(())
    }
}

/// Refuses a file system that is larger than its device: fsck, and at times the mount,
/// would repair it by dropping the data beyond the end.
fn not_cut_short(record: &Record, has: u64, content: &Content) -> Result<(), Cause> {
    let Content::Fs(info) = content else {
        return Ok(());
    };
    if info.bytes <= has {
        return Ok(());
    }
    Err(Cause::precondition(format!(
        "{} has {has} bytes, less than the {} of the {} on it: it was cut short; make it as large again, or restore its data",
        record.source,
        info.bytes,
        info.fs.as_str(),
    )))
}

/// The content in words, for errors.
pub(super) fn describe(content: &Content) -> String {
    match content {
        Content::Blank => "nothing".to_owned(),
        Content::Fs(info) => format!("{} with data", info.fs.as_str()),
        Content::Foreign { what } => (*what).to_owned(),
        Content::Unknown { offset } => format!("unknown data at byte {offset}"),
    }
}

/// The program to run.
#[derive(Clone, Copy)]
enum Run {
    Mkfs,
    Fsck,
}

async fn run_child<T>(
    cx: OnLane<'_>,
    source: &Source,
    command: &CommandLine,
    run: Run,
    meaning: impl FnOnce(Exit) -> Result<T, Cause>,
) -> Result<T, Cause> {
    let gates = &cx.node.config.gates;
    let (step, gate) = match run {
        Run::Mkfs => ("mkfs", &gates.mkfs),
        Run::Fsck => ("fsck", &gates.fsck),
    };
    let permit = cx.admit(gate, source).await?;
    let (progress, program, args) = (cx.progress.clone(), command.program, command.args.clone());
    let run = move || async move {
        let child = Child::spawn(program, &args).await?;
        let pid = child.pid();
        progress.waits_for(format!("{program}, process {pid}"));
        let mut exit = pin!(child.wait());
        let mut seen = exec::activity(pid);
        loop {
            if let Ok(exit) = tokio::time::timeout(exec::LIFE_EVERY, exit.as_mut()).await {
                return exit;
            }
            let now = exec::activity(pid);
            if now != seen {
                permit.renew();
                seen = now;
            }
        }
    };
    let failed = Cause::io(format!("run {}", Path::new(command.program).display()));
    cx.wait(step, async {
        meaning(cx.node.on_runtime(run).await.map_err(failed)?)
    })
    .await
}

#[cfg(test)]
mod tests;
