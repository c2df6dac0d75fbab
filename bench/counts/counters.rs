//! The kernel's counters of a process: perf_event_open(2), proc_pid_status(5), and
//! strace's.

use std::{
    ffi::CStr,
    fs, io,
    ops::Sub,
    os::fd::AsRawFd as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use perf_event::{Builder, Counter, events::Tracepoint};
use rustix::{
    mount::{MountFlags, mount},
    process::{Pid, Signal, kill_process},
};

/// System calls, and context switches of threads that wait for something: how often a
/// thread is preempted depends on the load of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Count {
    pub calls: u64,
    pub switches: u64,
}

/// By how many calls two runs of one build differ at most: those of two more wakeups of
/// threads, on a loaded machine.
const ROOM: u64 = 6;

impl Count {
    /// Whether this is more than `expected`, and by more than two runs of one build differ.
    pub fn exceeds(self, expected: Self) -> bool {
        self.calls > expected.calls + ROOM
            || self.switches > expected.switches + (expected.switches / 10).max(2)
    }

    /// Whether these are fewer calls than `expected`, and by more than two runs of one build
    /// differ.
    pub fn saves_calls(self, expected: Self) -> bool {
        self.calls + ROOM < expected.calls
    }

    /// What nine tenths of the rounds have at least.
    pub fn lowest_decile(rounds: &[Self]) -> Self {
        let decile = |of: fn(&Self) -> u64| {
            let mut numbers: Vec<_> = rounds.iter().map(of).collect();
            numbers.sort_unstable();
            numbers[numbers.len() / 10]
        };
        Self {
            calls: decile(|round| round.calls),
            switches: decile(|round| round.switches),
        }
    }
}

impl Sub for Count {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            calls: self.calls - earlier.calls,
            // A thread that has ended took its own with it.
            switches: self.switches.saturating_sub(earlier.switches),
        }
    }
}

/// Counters of a process: of each of its threads, and the threads that these start.
pub struct Counters {
    pid: u32,
    tids: Vec<i32>,
    /// Of all threads of the process, also those that it starts later.
    of_all: bool,
    calls: Vec<Counter>,
    checks: Vec<Counter>,
}

/// What this thread does in one of `rounds` runs of `work`, on average. None if this
/// kernel has no such events.
pub fn of_this_thread(rounds: u64, work: impl Fn()) -> Option<Count> {
    let mut counters = Counters::of_threads(std::process::id(), &[gettid()])?;
    let before = counters.read();
    for _ in 0..rounds {
        work();
    }
    let all = counters.read() - before;
    Some(Count {
        calls: all.calls / rounds,
        switches: all.switches / rounds,
    })
}

fn gettid() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

impl Counters {
    /// None if this kernel has no such events.
    pub fn of(pid: u32) -> Option<Self> {
        let mut counters = Self::of_threads(pid, &threads(pid))?;
        counters.of_all = true;
        Some(counters)
    }

    fn of_threads(pid: u32, threads: &[i32]) -> Option<Self> {
        let [calls, checks] =
            ["raw_syscalls/sys_enter", "syscalls/sys_enter_fcntl"].map(tracepoint);
        let tracepoint = |id: u64| Builder::new(Tracepoint::with_id(id));
        let each = |mut builder: Builder<'_>| {
            let counter = |tid: &i32| {
                builder.observe_pid(*tid).any_cpu().inherit(true);
                builder.exclude_kernel(false).exclude_hv(false);
                let mut counter = builder.build().expect("the kernel's events, as root");
                counter.enable().expect("a counter");
                counter
            };
            threads.iter().map(counter).collect()
        };
        Some(Self {
            pid,
            tids: threads.to_owned(),
            of_all: false,
            calls: each(tracepoint(calls?)),
            checks: each(tracepoint(checks?))
                .into_iter()
                .map(of_checks)
                .collect(),
        })
    }

    /// When the process has done nothing for a moment: it works on after its answers.
    pub fn read_idle(&mut self) -> Count {
        let mut before = self.read();
        loop {
            thread::sleep(Duration::from_millis(1));
            let now = self.read();
            if now == before {
                return now;
            }
            before = now;
        }
    }

    fn read(&mut self) -> Count {
        let sum = |counters: &mut [Counter]| -> u64 {
            let values = counters.iter_mut().map(Counter::read);
            values.map(|value| value.expect("a counter")).sum()
        };
        // In a debug build, Rust's library asks of each descriptor that it closes whether
        // it is open (F_GETFD).
        let checks = if cfg!(debug_assertions) {
            sum(&mut self.checks)
        } else {
            0
        };
        let threads = if self.of_all {
            &threads(self.pid)
        } else {
            &self.tids
        };
        Count {
            calls: sum(&mut self.calls) - checks,
            switches: threads.iter().map(|tid| waits(self.pid, *tid)).sum(),
        }
    }

    /// Lists the process's system calls by name until [`Names::print`].
    pub fn names(&self, output: &Path) -> Names {
        let mut strace = Command::new("strace")
            .args(["-f", "-c", "-U", "calls,errors,name", "-S", "calls", "-o"])
            .arg(output)
            .args(["-p", &self.pid.to_string()])
            .stderr(Stdio::null())
            .spawn()
            .expect("strace");
        while !threads(self.pid)
            .iter()
            .all(|tid| is_traced(self.pid, *tid))
        {
            assert!(
                strace.try_wait().expect("a child").is_none(),
                "strace ended"
            );
            thread::yield_now();
        }
        Names(strace)
    }
}

/// A strace.
pub struct Names(Child);

impl Names {
    pub fn print(mut self, output: &Path) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), Signal::INT).expect("a signal");
        self.0.wait().expect("a child");
        print!("{}", fs::read_to_string(output).expect("strace's table"));
    }
}

/// Of calls of fcntl, counts those that ask for the descriptor's flags alone; the counters
/// that are inherited have the filter, too.
fn of_checks(counter: Counter) -> Counter {
    const SET_FILTER: libc::Ioctl = 0x4008_2406;
    const F_GETFD: &CStr = c"cmd == 1";
    // SAFETY: PERF_EVENT_IOC_SET_FILTER copies a C string, which outlives the call.
    let set = unsafe { libc::ioctl(counter.as_raw_fd(), SET_FILTER, F_GETFD.as_ptr()) };
    assert_eq!(set, 0, "a filter: {}", io::Error::last_os_error());
    counter
}

fn threads(pid: u32) -> Vec<i32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).expect("procfs");
    let tid = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    entries.filter_map(tid).collect()
}

/// How often a thread has waited; 0 if it has ended meanwhile.
fn waits(pid: u32, tid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"));
    let status = status.unwrap_or_default();
    let key = "voluntary_ctxt_switches:";
    let count = status.lines().find_map(|line| line.strip_prefix(key));
    count.map_or(0, |count| count.trim().parse().expect("a number"))
}

fn is_traced(pid: u32, tid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"));
    status.is_ok_and(|status| !status.contains("TracerPid:\t0\n"))
}

/// The id of a tracepoint; none on a kernel without FTRACE_SYSCALLS.
fn tracepoint(name: &str) -> Option<u64> {
    let tracefs = Path::new("/sys/kernel/tracing");
    let id = tracefs.join("events").join(name).join("id");
    if !id.exists() {
        // In the sandbox's mount namespace alone.
        mount("tracefs", tracefs, "tracefs", MountFlags::empty(), None).ok()?;
    }
    fs::read_to_string(id).ok()?.trim().parse().ok()
}
