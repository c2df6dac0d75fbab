//! The backend `nbd`: exports of NBD servers, attached by the kernel's driver.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    AttachOptions, Backing, Condition, Device, Purpose, Source,
    backend::{Attachment, BackendVolume, FormatMarker as _, FoundDevice, Owner},
    context::{SourceError, VolumeContext},
    error::{DeviceError, io},
    format_markers::NodeFormatMarkers,
    in_use,
    nbd::{self, Identifier, Links},
    read_only_mark,
};
use crate::{
    Detached, Done, error_chain,
    kernel::{Dev, nbd::NbdDevice},
    nbd::{BadExport, CONNECTIONS, DEAD_SECONDS, Export, REQUEST_SECONDS, Server},
    size::{BadSize, Size},
};

/// An export of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSource {
    /// The export's address.
    pub export: Export,
    /// How it is attached.
    #[serde(flatten)]
    pub options: nbd::LinkOptions,
}

/// The defaults of an attach. A busy disk behind the server takes seconds to answer at
/// times; moving a server to another machine takes minutes.
const OPTIONS: nbd::LinkOptions = nbd::LinkOptions {
    connections: 2,
    request_seconds: 30,
    dead_seconds: 300,
    minimum_bytes: 0,
};

impl fmt::Display for ExportSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "export {}", self.export)
    }
}

impl ExportSource {
    /// An export, to be attached by the defaults.
    pub fn new(export: Export) -> Self {
        Self {
            export,
            options: OPTIONS,
        }
    }

    /// Reads `uri`, or `host`, `port` and `export`, or `socket` and `export`; and
    /// `connections`, `requestTimeout` and `deadConnectionTimeout` in seconds,
    /// and `minSize`, as `10Gi`.
    pub fn parse(context: VolumeContext<'_>) -> Result<Self, SourceError> {
        context.refuse_unlisted(&[
            "backend",
            "uri",
            "host",
            "port",
            "socket",
            "export",
            "connections",
            "requestTimeout",
            "deadConnectionTimeout",
            "minSize",
        ])?;
        let seconds = |key, range| context.number(key, range);
        Ok(Self {
            export: address(context)?,
            options: nbd::LinkOptions {
                connections: context
                    .number("connections", CONNECTIONS)?
                    .unwrap_or(OPTIONS.connections),
                request_seconds: seconds("requestTimeout", REQUEST_SECONDS)?
                    .unwrap_or(OPTIONS.request_seconds),
                dead_seconds: seconds("deadConnectionTimeout", DEAD_SECONDS)?
                    .unwrap_or(OPTIONS.dead_seconds),
                minimum_bytes: minimum_bytes(context)?,
            },
        })
    }

    /// Whether the device is attached, and to this export.
    pub fn is_behind(&self, dev: Dev) -> bool {
        nbd::is_behind(dev, &self.export)
    }

    /// Whether both are the same export, however attached.
    pub fn is_same(&self, other: &Self) -> bool {
        self.export == other.export
    }
}

fn minimum_bytes(context: VolumeContext<'_>) -> Result<u64, SourceError> {
    let key = "minSize";
    let Some(text) = context.get(key) else {
        return Ok(OPTIONS.minimum_bytes);
    };
    let size: Result<Size, BadSize> = text.parse();
    size.map(|size| size.bytes().unsigned_abs())
        .map_err(|bad| SourceError {
            key: key.into(),
            why: bad.to_string(),
        })
}

/// The export's address, given in exactly one of three ways.
fn address(context: VolumeContext<'_>) -> Result<Export, SourceError> {
    let bad = |key: &'static str| {
        move |error: BadExport| SourceError {
            key: key.into(),
            why: error.to_string(),
        }
    };
    let clash = |why: &str| SourceError {
        key: "uri".into(),
        why: why.to_owned(),
    };
    let name = context.get("export").unwrap_or_default();
    match (
        context.get("uri"),
        context.get("host"),
        context.get("socket"),
    ) {
        (Some(_), None, None) if !name.is_empty() || context.get("port").is_some() => {
            Err(clash("names the export and the port itself"))
        }
        (Some(uri), None, None) => uri.parse().map_err(bad("uri")),
        (None, Some(host), None) => {
            let port = context.number("port", 1..=65535)?;
            let server = Server::tcp(host, port).map_err(bad("host"))?;
            Export::new(server, name).map_err(bad("export"))
        }
        (None, None, Some(socket)) => {
            let server = Server::unix(socket).map_err(bad("socket"))?;
            Export::new(server, name).map_err(bad("export"))
        }
        (None, None, None) => Err(clash("is required, or host, or socket")),
        _ => Err(clash("uri, host and socket exclude each other")),
    }
}

/// The attached exports of this node.
#[derive(Clone, Debug)]
pub struct Exports {
    /// Their links to the servers.
    pub links: Links,
    /// The format markers, which are this node's.
    pub format_markers: NodeFormatMarkers,
}

impl Exports {
    /// The device that is attached for the volume.
    pub fn find(&self, volume_id: &str) -> Result<Option<FoundDevice>, DeviceError> {
        self.find_where(|identifier| identifier.volume_id == volume_id)
    }

    /// The export behind a device, where this or an earlier agent attached it.
    pub fn find_behind(&self, dev: Dev) -> Result<Option<FoundDevice>, DeviceError> {
        match Identifier::of(dev) {
            Some(identifier) => self.find_where(|other| *other == identifier),
            None => Ok(None),
        }
    }

    /// The owner of a device that this driver attached.
    pub fn owner_of(&self, dev: Dev) -> Owner {
        Identifier::of(dev)
            .filter(|its| *its == self.links.identifier(&its.export, &its.volume_id))
            .map_or(Owner::None, |its| Owner::Volume(its.volume_id))
    }

    fn find_where(
        &self,
        predicate: impl Fn(&Identifier) -> bool,
    ) -> Result<Option<FoundDevice>, DeviceError> {
        let found = self.links.find(predicate);
        let found = found.map_err(io("list the NBD devices"))?;
        Ok(found.map(|(device, identifier)| FoundDevice {
            device: device_of(device, &identifier.export),
            source: Source::export(identifier.export),
        }))
    }

    /// The export, bound to this node's links.
    pub fn bind<'a>(&'a self, source: &'a ExportSource) -> BoundExport<'a> {
        BoundExport {
            exports: self,
            source,
        }
    }
}

fn device_of(device: NbdDevice, export: &Export) -> Device {
    Device {
        dev: device.block.dev,
        node: device.block.node,
        backing: Backing::Export(export.clone()),
        read_only: device.read_only,
        diskseq: None,
        encrypted: None,
    }
}

/// An export, bound to this node's links.
#[derive(Debug)]
pub struct BoundExport<'a> {
    exports: &'a Exports,
    source: &'a ExportSource,
}

impl BoundExport<'_> {
    fn identifier(&self, volume_id: &str) -> Identifier {
        self.exports
            .links
            .identifier(&self.source.export, volume_id)
    }
}

impl BackendVolume for BoundExport<'_> {
    fn attach(&self, options: &AttachOptions) -> Result<(Attachment, Done), DeviceError> {
        let marker = self.exports.format_markers.of(self.source.to_string());
        if options.gives_out_raw() {
            marker.clear()?;
        }
        let (links, identifier) = (&self.exports.links, self.identifier(&options.volume_id));
        let (device, done) = links.attach(&identifier, options.read_only, &self.source.options)?;
        let device = device_of(device, &self.source.export);
        if done == Done::Already {
            in_use::refuse(&device.node, device.dev, options)?;
        }
        read_only_mark::clear_left(&device, options.purpose)?;
        let attachment = Attachment {
            device,
            is_ready: false,
            exclusive: None,
            format_marker: Arc::new(marker),
        };
        Ok((attachment, done))
    }

    fn recover(&self, device: &Device, volume_id: &str) {
        let (links, identifier) = (&self.exports.links, self.identifier(volume_id));
        let device = NbdDevice {
            block: device.block(),
            read_only: device.read_only,
        };
        let recovered = links.recover(&identifier, &device, &self.source.options);
        if let Err(error) = recovered {
            let error = error_chain(&error);
            tracing::error!(error, volume_id, "cannot recover the link to the server");
        }
    }

    fn condition(&self, _: &Device) -> Option<Condition> {
        let outage = self.exports.links.outage(&self.source.export)?;
        let age = outage.since.elapsed();
        Some(Condition::Unreachable {
            failing: age > outage.timeout,
            why: format!("for {} s: {}", age.as_secs(), outage.why),
        })
    }

    /// The kernel keeps the volume that it was attached for.
    fn is_claimed_for(&self, volume_id: &str) -> Result<bool, DeviceError> {
        let wanted = self.identifier(volume_id);
        let found = self
            .exports
            .find_where(|identifier| *identifier == wanted)?;
        Ok(found.is_some())
    }

    fn attached(&self) -> Result<Option<Device>, DeviceError> {
        let found = self
            .exports
            .find_where(|identifier| identifier.export == self.source.export)?;
        Ok(found.map(|found| found.device))
    }

    fn detach(
        &self,
        device: &Device,
        volume_id: &str,
        purpose: Purpose,
    ) -> Result<Detached, DeviceError> {
        read_only_mark::clear_published(device, purpose);
        let links = &self.exports.links;
        Ok(links.detach(&self.identifier(volume_id), &device.block())?)
    }

    fn release(&self, _: &str) -> Result<(), DeviceError> {
        // The next node that has it may fill it.
        self.exports.format_markers.clear(self.source)
    }

    fn leaves_partial_format(&self, volume_id: &str) -> Result<bool, DeviceError> {
        self.exports.format_markers.is_fresh(self.source, volume_id)
    }

    /// The export grows at the server.
    fn grow(&self, _: &Device, _: u64) -> Result<u64, DeviceError> {
        Ok(self.exports.links.grow(&self.source.export)?)
    }
}
