//! Commands to the manager.
//!
//! In librados before Ceph 20 a command to the manager that times out leaves pointers to its
//! caller's stack, through which a late answer is written (<https://tracker.ceph.com/issues/65985>).
//! So these commands have a connection of their own, without a timeout, and run on a thread that
//! waits for the answer as long as it takes; the caller waits for the thread, and not for
//! longer than its own timeout. One such thread runs at a time, so that a manager that hangs
//! leaves one.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use serde_json::Value;

use super::{Cluster, connect::Origin};
use crate::ceph::client::CephError;

/// The manager, for the users of one connection.
#[derive(Debug, Default)]
pub(super) struct ManagerCommands {
    turn: Mutex<Turn>,
    /// Notified when a command has ended.
    ended: Condvar,
}

/// A command is not begun with less time than that: it would only become overdue.
const LEAST: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Turn {
    state: CommandState,
    /// The name of the last command that was begun.
    prefix: String,
    /// And all of it.
    command: String,
    /// Made for the first command.
    connection: Option<Arc<Cluster>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CommandState {
    #[default]
    None,
    UnderWay,
    /// Its caller has given up.
    Overdue,
}

type CommandAnswer = Result<Vec<u8>, CephError>;

impl Cluster {
    /// Sends the manager a command, as [`Self::mon_command`] does to the monitors. The manager
    /// may still carry out a command that fails by [`CephError::is_unanswered`]; while it has
    /// not answered one, others fail alike.
    pub fn mgr_command(&self, command: &Value) -> CommandAnswer {
        let deadline = Instant::now() + self.origin.timeouts.operation;
        let failed = |errno| {
            let what = format!("the manager command {}", command["prefix"]);
            CephError::new("run", what, errno)
        };
        let running = ManagerCommands::begin(&self.manager, command, deadline)?;
        let answer = running.start(self.origin.clone(), command.clone());
        let answer = answer.map_err(|_| failed(Errno::AGAIN))?;
        let left = deadline.saturating_duration_since(Instant::now());
        self.manager.wait(&answer, left).map_err(failed)?
    }
}

impl ManagerCommands {
    /// Waits for the end of another's command, and fails if that is overdue.
    fn begin(
        this: &Arc<Self>,
        command: &Value,
        deadline: Instant,
    ) -> Result<RunningCommand, CephError> {
        let left = || deadline.saturating_duration_since(Instant::now());
        let is_other = |turn: &mut Turn| turn.state == CommandState::UnderWay;
        let waited = this.ended.wait_timeout_while(this.lock(), left(), is_other);
        let (mut turn, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if turn.state != CommandState::None || left() < LEAST {
            return Err(CephError::ManagerOverdue {
                command: command["prefix"].to_string(),
                earlier: turn.prefix.clone(),
            });
        }
        turn.state = CommandState::UnderWay;
        turn.prefix = command["prefix"].to_string();
        turn.command = command.to_string();
        Ok(RunningCommand(this.clone()))
    }

    /// The answer to the command under way, if it comes in time.
    fn wait(
        &self,
        answer: &Receiver<CommandAnswer>,
        timeout: Duration,
    ) -> Result<CommandAnswer, Errno> {
        match answer.recv_timeout(timeout) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(Errno::IO),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // The thread answers before it ends its turn, so without an answer the turn is its own.
        let mut turn = self.lock();
        match answer.try_recv() {
            Ok(answer) => Ok(answer),
            Err(TryRecvError::Disconnected) => Err(Errno::IO),
            Err(TryRecvError::Empty) => {
                let command = &turn.command;
                tracing::warn!(
                    command,
                    "Ceph's manager has not answered a command; until it does, it is asked nothing else"
                );
                turn.state = CommandState::Overdue;
                self.ended.notify_all();
                Err(Errno::TIMEDOUT)
            }
        }
    }

    /// The connection for commands.
    fn connection(&self, origin: &Origin) -> Result<Arc<Cluster>, CephError> {
        let usable = |connection: &Arc<Cluster>| !connection.is_lost();
        if let Some(connection) = self.lock().connection.clone().filter(usable) {
            return Ok(connection);
        }
        let connection = Cluster::connect_to_manager(origin)?;
        let former = self.lock().connection.replace(connection.clone());
        // Without the lock, because it may block.
        drop(former);
        Ok(connection)
    }

    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A command's turn, which ends when this is dropped.
struct RunningCommand(Arc<ManagerCommands>);

impl RunningCommand {
    fn start(self, origin: Arc<Origin>, command: Value) -> io::Result<Receiver<CommandAnswer>> {
        let (sender, answer) = channel();
        let run = move || {
            // The sender is dropped first, also by a panic.
            let (turn, sender) = (self, sender);
            let connection = turn.0.connection(&origin);
            let done = connection.and_then(|connection| connection.ask_manager(&command));
            // The caller may have given up.
            let _ = sender.send(done);
        };
        thread::Builder::new()
            .name("ceph-manager".into())
            .spawn(run)?;
        Ok(answer)
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        self.0.lock().state = CommandState::None;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::process::{Pid, Signal, kill_process};
    use serde_json::json;
    use testkit::{TestCluster, eventually};

    use super::*;
    use crate::ceph::{
        client::rados::Cluster,
        testing::{credentials, timeouts},
    };

    #[tokio::test]
    async fn a_late_answer_of_the_manager_harms_nothing() {
        let Some(of_tests) = TestCluster::own() else {
            return;
        };
        let (monitors, user) = (&of_tests.monitors, credentials(&of_tests));
        let cluster = Cluster::connect(monitors, &user, timeouts(2)).unwrap();
        let list = || cluster.mgr_command(&json!({"prefix": "rbd task list"}));
        eventually("a manager", async || list().ok()).await;
        let manager = fs::read_to_string(of_tests.dir().join("mgr.x.pid")).unwrap();
        let manager = Pid::from_raw(manager.trim().parse().unwrap()).unwrap();
        for _ in 0..3 {
            kill_process(manager, Signal::STOP).unwrap();
            let timed_out = list().unwrap_err();
            assert!(timed_out.is_timed_out(), "{timed_out}");
            let refused = list().unwrap_err();
            assert!(refused.is_unanswered(), "{refused}");
            assert!(!refused.is_timed_out(), "{refused}");
            assert!(refused.to_string().contains("rbd task list"), "{refused}");
            // Nothing else waits for it.
            assert!(!cluster.is_lost());
            cluster.mon_command(&json!({"prefix": "df"})).unwrap();
            kill_process(manager, Signal::CONT).unwrap();
            eventually("an answer", async || list().ok()).await;
        }
    }

    #[test]
    fn a_command_that_waited_for_its_turn_too_long_is_not_begun() {
        let commands = Arc::new(ManagerCommands::default());
        let begin = |prefix: &str, deadline: Instant| {
            let command = json!({"prefix": prefix});
            ManagerCommands::begin(&commands, &command, deadline)
        };
        let after = |timeout| Instant::now() + timeout;
        let first = begin("first", after(2 * LEAST)).unwrap();
        let deadline = after(LEAST + LEAST / 2);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| begin("second", deadline));
            // Less than the least time is left then, however late that thread begins.
            thread::sleep(LEAST);
            drop(first);
            let refused = waiting.join().unwrap().err().expect("a refusal");
            assert!(refused.is_unanswered(), "{refused}");
            assert!(refused.to_string().contains("first"), "{refused}");
        });
        drop(begin("third", after(2 * LEAST)).unwrap());
    }
}
