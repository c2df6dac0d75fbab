//! The kernel's uevents, taken without waiting: the block devices that changed since the last
//! look.
//!
//! The kernel has an event in the socket of each listener before the call that caused it
//! returns (lib/kobject_uevent.c), so a look after such a call sees it. In a network namespace
//! that a user namespace other than the first owns there are none of devices.
//!
//! A socket holds some hundred events. More are lost, which is cheaper than to take them all.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_KOBJECT_UEVENT};
use rustix::io::Errno;

/// The multicast group of the kernel's events; udevd's have another.
const KERNEL: u32 = 1;

/// Bytes of an event to read: `change@`, and the device's path in sysfs.
const HEADER: usize = 512;

/// Events that wait to be taken.
#[derive(Debug)]
pub struct PendingUevents(Socket);

impl PendingUevents {
    /// Starts to listen.
    pub fn listen() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_KOBJECT_UEVENT)?;
        socket.bind(&SocketAddr::new(0, KERNEL))?;
        Ok(Self(socket))
    }

    /// One that hears nothing.
    #[cfg(test)]
    pub fn deaf() -> Self {
        Self(Socket::new(NETLINK_KOBJECT_UEVENT).unwrap())
    }

    /// One that holds few events.
    #[cfg(test)]
    pub fn narrow() -> Self {
        let listening = Self::listen().unwrap();
        let socket = std::os::fd::AsFd::as_fd(&listening.0);
        rustix::net::sockopt::set_socket_recv_buffer_size(socket, 0).unwrap();
        listening
    }

    /// Takes all events that are there. Returns the names in sysfs of their block devices,
    /// without partitions, or nothing if events were lost.
    pub fn take(&self) -> io::Result<Option<Vec<String>>> {
        let mut found = Some(Vec::new());
        let mut event = Vec::with_capacity(HEADER);
        loop {
            event.clear();
            match self.0.recv_from(&mut event, libc::MSG_DONTWAIT) {
                // Other processes may send to the group, but not from the kernel's port.
                Ok((_, from)) if from.port_number() == 0 => {
                    if let Some(found) = &mut found {
                        found.extend(block_device(&event));
                    }
                }
                Ok(_) => {}
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) => return Ok(found),
                    Some(Errno::INTR) => {}
                    Some(Errno::NOBUFS) => found = None,
                    _ => return Err(error),
                },
            }
        }
    }
}

/// The name of the event's block device: `nbd7` of `change@/devices/virtual/block/nbd7`.
fn block_device(event: &[u8]) -> Option<String> {
    let header = event.split(|byte| *byte == 0).next()?;
    let (_, path) = std::str::from_utf8(header).ok()?.split_once('@')?;
    let (_, name) = path.rsplit_once("/block/")?;
    (!name.contains('/')).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_event_names_its_block_device() {
        for (event, name) in [
            (
                "change@/devices/virtual/block/nbd7\0ACTION=change",
                Some("nbd7"),
            ),
            ("add@/devices/virtual/block/nbd7/nbd7p1\0", None),
            ("add@/devices/virtual/bdi/43:7\0", None),
            ("change@/devices/virtual/block/", Some("")),
            ("", None),
        ] {
            assert_eq!(block_device(event.as_bytes()).as_deref(), name, "{event}");
        }
    }

    proptest! {
        #[test]
        fn any_event_is_read_or_ignored(event: Vec<u8>) {
            let _ = block_device(&event);
        }
    }
}
