use std::{fs, future::Future, path::Path, time::Duration};

use super::*;
use crate::{
    device::{loopdev, scratch::Scratch},
    kernel::Dev,
    ring,
};

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), future)
        .await
        .unwrap()
}

#[test]
fn a_loop_device_is_seen_coming_and_growing() {
    let image = Scratch::image(1 << 20);
    ring::start(async {
        let uevents = Uevents::start().unwrap();
        let scratch = Scratch::over(image);
        let (dev, node) = (scratch.device.dev, &scratch.device.node);
        let (source, device) = (scratch.source(), scratch.as_volume_s());
        let found = soon(ready(&uevents, &source, &device)).await.unwrap();
        assert_eq!(
            found,
            Ready {
                node: node.clone(),
                bytes: 1 << 20
            }
        );

        let sysname = sysfs::name_of(dev).unwrap();
        assert_eq!(Path::new("/dev").join(&sysname), *node);
        let grown = uevents.wait(&sysname, || {
            Ok(Some(sysfs::size_bytes(dev)?).filter(|size| *size == 2 << 20))
        });
        let grow = async {
            tokio::task::yield_now().await;
            scratch.image.as_file().set_len(2 << 20).unwrap();
            loopdev::resize(&scratch.device).unwrap();
        };
        let (grown, ()) = soon(async { tokio::join!(grown, grow) }).await;
        assert_eq!(grown.unwrap(), 2 << 20);

        assert!(uevents.waiters.lock().waiters.is_empty());
    })
    .unwrap();
}

#[test]
fn after_lost_uevents_every_waiter_checks_again() {
    ring::start(async {
        let uevents = Uevents::start().unwrap();
        let mut looks = 0;
        let waiting = uevents.wait("no-such-device", || {
            looks += 1;
            Ok((looks == 2).then_some(()))
        });
        let lose = async {
            tokio::task::yield_now().await;
            uevents.waiters.wake(None);
        };
        soon(async { tokio::join!(waiting, lose) }).await.0.unwrap();
        assert_eq!(looks, 2);
    })
    .unwrap();
}

#[test]
fn an_overflow_of_the_uevent_socket_is_reported() {
    ring::start(async {
        let builder = udev::MonitorBuilder::new_kernel().unwrap();
        let builder = builder.match_subsystem("block").unwrap();
        sockopt::set_socket_recv_buffer_size(&builder, 0).unwrap();
        let socket = builder.listen().unwrap();
        let waiters = Waiters::default();
        let listed = Registration::new(&waiters, "no-such-device");

        // More events than the smallest buffer holds, of a device at hand: a
        // write of its sysfs uevent repeats the event (sysfs-uevent).
        for _ in 0..64 {
            fs::write("/sys/class/block/loop0/uevent", "change").unwrap();
        }
        take_events(&socket, &waiters);
        soon(listed.waiter.look.notified()).await;
    })
    .unwrap();
}

#[test]
fn once_the_listener_has_ended_it_is_not_alive() {
    ring::start(async {
        let uevents = Uevents::start().unwrap();
        assert!(uevents.is_alive());
        uevents.listener.abort();
        while uevents.is_alive() {
            tokio::task::yield_now().await;
        }
    })
    .unwrap();
}

#[test]
fn a_failing_check_ends_the_wait() {
    ring::start(async {
        let uevents = Uevents::start().unwrap();
        let failed = uevents
            .wait::<()>("loop0", || Err(io::Error::other("no")))
            .await;
        assert_eq!(failed.unwrap_err().to_string(), "no");
        let mut nobody = Scratch::new(1 << 20).as_volume_s();
        nobody.dev = Dev {
            major: 4095,
            minor: 7,
        };
        let missing = ready(&uevents, &Source::image("p", "i"), &nobody)
            .await
            .unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    })
    .unwrap();
}
