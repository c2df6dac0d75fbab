//! Tests that need a kernel with the NBD driver.

use std::{
    io::{Read as _, Write as _},
    os::unix::{fs::FileExt as _, net::UnixStream},
    path::Path,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use testkit::skip_test;
use uuid::Uuid;

use super::{netlink::Connect, *};

const BYTES: u64 = 1 << 20;
const READ: u32 = 0;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;

/// Whether the server answers, or leaves requests unanswered.
type Answers = Arc<(Mutex<bool>, Condvar)>;

/// A device that is disconnected at the test's end.
pub(super) struct Attached {
    driver: Driver,
    pub identifier: String,
    pub device: NbdDevice,
    answers: Answers,
}

fn set(answers: &Answers, value: bool) {
    *answers.0.lock().unwrap() = value;
    answers.1.notify_all();
}

impl Attached {
    pub fn new() -> Option<Self> {
        if !Path::new("/sys/module/nbd").exists() {
            skip_test("the kernel module nbd is not loaded here");
            return None;
        }
        let (socket, server) = UnixStream::pair().unwrap();
        // The server answers at first, because udevd reads the device, too.
        let answers = Answers::new((Mutex::new(true), Condvar::new()));
        let its = Arc::clone(&answers);
        thread::spawn(move || serve(server, &its));
        let identifier = format!("test {}", Uuid::new_v4());
        let driver = Driver::open().unwrap();
        let connect = Connect {
            index: None,
            identifier: &identifier,
            bytes: BYTES,
            block_bytes: 512,
            flags: 1,
            request_seconds: 30,
            dead_seconds: 0,
            sockets: &[socket.as_fd()],
        };
        let device = NbdDevice::of_index(driver.connect(&connect).unwrap()).unwrap();
        Some(Self {
            driver,
            identifier,
            device,
            answers,
        })
    }

    fn claim(&self) -> io::Result<Option<Claimed>> {
        Claimed::new(&self.device.block, |has| has == self.identifier)
    }

    /// Starts a read past every cache, which stays unanswered.
    fn read(&self) -> thread::JoinHandle<io::Result<()>> {
        set(&self.answers, false);
        let BlockDev { node, dev } = self.device.block.clone();
        let reader = thread::spawn(move || {
            let file = block::open(&node, dev, OFlags::DIRECT)?;
            let mut memory = vec![0; 8192];
            let start = memory.as_ptr().align_offset(4096);
            File::from(file).read_exact_at(&mut memory[start..start + 4096], 0)
        });
        while sysfs::in_flight(dev).unwrap() == 0 {
            thread::yield_now();
        }
        reader
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        set(&self.answers, true);
        let _ = self
            .driver
            .disconnect(index_of(self.device.block.dev).unwrap());
    }
}

fn serve(mut socket: UnixStream, answers: &Answers) {
    let mut request = [0; 28];
    while socket.read_exact(&mut request).is_ok() {
        let word = |at| u32::from_be_bytes(request[at..at + 4].try_into().unwrap());
        assert_eq!(word(0), REQUEST);
        if word(4) != READ {
            return;
        }
        let held = answers.0.lock().unwrap();
        drop(answers.1.wait_while(held, |answers| !*answers).unwrap());
        let mut reply = [&REPLY.to_be_bytes()[..], &[0; 4], &request[8..16]].concat();
        reply.resize(16 + word(24) as usize, 0);
        socket.write_all(&reply).unwrap();
    }
}

#[test]
fn a_device_is_found_claimed_and_disconnected_by_its_identifier() {
    let Some(it) = Attached::new() else {
        return;
    };
    let found = || NbdDevice::attached_as(&it.identifier).unwrap();
    assert_eq!(found().as_ref(), Some(&it.device));
    assert_eq!(it.device.size_bytes().unwrap(), BYTES);
    assert_eq!(NbdDevice::attached_as("another").unwrap(), None);
    let other = Claimed::new(&it.device.block, |has| has == "another");
    assert!(other.unwrap().is_none());
    let claimed = it.claim().unwrap().unwrap();
    assert!(block::is_busy(&it.claim().unwrap_err()));
    claimed.disconnect(&it.driver).unwrap();
    // The device keeps its configuration while it is open, here or by udevd.
    drop(claimed);
    while found().is_some() {
        thread::yield_now();
    }
    assert_eq!(identifier_of(it.device.block.dev), None);
    assert!(it.claim().unwrap().is_none());
}

#[test]
fn a_request_in_flight_is_waited_for_and_one_without_an_answer_for_a_second() {
    let Some(it) = Attached::new() else {
        return;
    };
    let in_flight = || sysfs::in_flight(it.device.block.dev).unwrap();
    let reader = it.read();
    let claimed = it.claim().unwrap().unwrap();
    let answers = Arc::clone(&it.answers);
    let answerer = thread::spawn(move || {
        thread::park_timeout(DRAIN_WITHIN / 5);
        set(&answers, true);
    });
    claimed.drain(None);
    assert_eq!(in_flight(), 0);
    answerer.join().unwrap();
    reader.join().unwrap().unwrap();

    let reader = it.read();
    let begun = Instant::now();
    claimed.drain(None);
    assert!(in_flight() > 0 && begun.elapsed() >= DRAIN_WITHIN);
    claimed.disconnect(&it.driver).unwrap();
    assert!(reader.join().unwrap().is_err());
}

#[test]
fn an_own_lock_on_the_device_is_used_and_not_waited_for() {
    let Some(it) = Attached::new() else {
        return;
    };
    let BlockDev { node, dev } = &it.device.block;
    let open = || File::from(block::open(node, *dev, OFlags::RDONLY).unwrap());
    let own = open();
    flock(&own, FlockOperation::LockShared).unwrap();
    let claimed = it.claim().unwrap().unwrap();
    let begun = Instant::now();
    claimed.drain(Some(&own));
    assert!(begun.elapsed() < DRAIN_WITHIN);
    let udevd = flock(open(), FlockOperation::NonBlockingLockShared);
    assert_eq!(udevd, Err(Errno::WOULDBLOCK));
}
