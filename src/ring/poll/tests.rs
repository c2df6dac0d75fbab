use std::{cell::Cell, os::fd::OwnedFd};

use rustix::{
    fs::{Mode, OFlags, fcntl_setfl, open},
    io::{Errno, read, write},
    pipe::pipe,
};

use super::*;
use crate::ring;

fn nonblocking_pipe() -> (Rc<OwnedFd>, OwnedFd) {
    let (read, write) = pipe().unwrap();
    fcntl_setfl(&read, OFlags::NONBLOCK).unwrap();
    (Rc::new(read), write)
}

/// Reads until EAGAIN; returns how many bytes it read.
fn take(fd: &OwnedFd) -> usize {
    let mut sum = 0;
    loop {
        match read(fd, &mut [0; 64]) {
            Ok(0) | Err(Errno::AGAIN) => return sum,
            Ok(count) => sum += count,
            Err(error) => panic!("{error}"),
        }
    }
}

fn operations() -> usize {
    Poller::current().inner.borrow().ops.len()
}

#[test]
fn edges_follow_each_other_and_the_end_is_seen() {
    ring::start(async {
        let (source, sink) = nonblocking_pipe();
        let mut ready = watch(Rc::clone(&source), PollFlags::IN).unwrap();
        for _ in 0..3 {
            write(&sink, b"x").unwrap();
            assert!(ready.next().await.unwrap().contains(PollFlags::IN));
            assert_eq!(take(&source), 1);
        }
        drop(sink);
        assert!(ready.next().await.unwrap().contains(PollFlags::HUP));
    })
    .unwrap();
}

#[test]
fn a_multishot_that_the_kernel_ended_is_armed_again() {
    ring::start(async {
        let (source, sink) = nonblocking_pipe();
        let mut ready = watch(Rc::clone(&source), PollFlags::IN).unwrap();
        let poller = Poller::current();
        // Like an overflow, this causes a last completion without IORING_CQE_F_MORE.
        let cancel = opcode::AsyncCancel::new(ready.0.id).build();
        poller.with(|inner| inner.submit(&cancel)).unwrap();
        let ended = ready.next().await.unwrap_err();
        assert_eq!(ended.raw_os_error(), Some(libc::ECANCELED));
        assert!(!poller.inner.borrow().ops[&ready.0.id].in_kernel);
        write(&sink, b"x").unwrap();
        assert!(ready.next().await.unwrap().contains(PollFlags::IN));
    })
    .unwrap();
}

#[test]
fn more_completions_than_the_ring_holds_are_all_delivered() {
    ring::start(async {
        let pairs: Vec<_> = (0..400).map(|_| nonblocking_pipe()).collect();
        let mut ready: Vec<_> = pairs
            .iter()
            .map(|(source, _)| watch(Rc::clone(source), PollFlags::IN).unwrap())
            .collect();
        for round in 0..3 {
            // No task runs meanwhile, so 400 completions overflow a ring of 128.
            for (_, sink) in &pairs {
                write(sink, b"x").unwrap();
            }
            let poller = Poller::current();
            let overflow = poller.with(|inner| inner.ring.submission().cq_overflow());
            // The overflow ends multishots, which are armed again by the next wait only.
            assert!(overflow || round > 0);
            for ((source, _), ready) in pairs.iter().zip(&mut ready) {
                assert!(ready.next().await.unwrap().contains(PollFlags::IN));
                assert_eq!(take(source), 1);
            }
        }
    })
    .unwrap();
}

#[test]
fn a_dropped_wait_lets_go_of_the_descriptor() {
    struct Watched(OwnedFd, Rc<Cell<bool>>);
    impl AsFd for Watched {
        fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
    impl Drop for Watched {
        fn drop(&mut self) {
            self.1.set(true);
        }
    }
    ring::start(async {
        let closed = Rc::new(Cell::new(false));
        let (source, _sink) = pipe().unwrap();
        let ready = watch(Watched(source, Rc::clone(&closed)), PollFlags::IN).unwrap();
        drop(ready);
        while operations() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(closed.get());
    })
    .unwrap();
}

#[test]
fn a_descriptor_that_cannot_be_polled_is_an_error() {
    ring::start(async {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let path = open("/", OFlags::PATH, Mode::empty()).unwrap();
        // A regular file is always ready; an O_PATH descriptor cannot be polled.
        assert!(readable(file).await.unwrap().contains(PollFlags::IN));
        let error = readable(path).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        assert_eq!(operations(), 0);
    })
    .unwrap();
}
