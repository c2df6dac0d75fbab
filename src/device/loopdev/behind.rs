//! The file system behind a loop device that may be anybody's.
//!
//! Only the device itself tells (`LOOP_GET_STATUS64`), and it may take for ever: the open
//! waits for whoever configures it or writes back to it, the status for the server of the
//! backing file. So a thread asks, and the caller waits for a moment. A device that hangs
//! has one such thread, whoever asks.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::status_of;
use crate::kernel::{Dev, sysfs};

/// How long a device may take. It is not waited for again until it has answered.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// A question that a thread has asked a device.
struct Question {
    asked: Instant,
    /// None until the device has answered.
    answer: Mutex<Option<io::Result<Dev>>>,
    answered: Condvar,
}

/// The questions without an answer, by the device's number.
static UNANSWERED: Mutex<BTreeMap<u32, Arc<Question>>> = Mutex::new(BTreeMap::new());

/// Nothing can panic under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `st_dev` of the file behind a loop device; none where nothing is behind it, or where
/// the device does not tell in time.
pub fn file_system_behind(dev: Dev) -> Option<Dev> {
    let number = sysfs::number_in(&sysfs::name_of(dev).ok()?, "loop")?;
    let question = ask(number)?;
    let left = ANSWERS_WITHIN.saturating_sub(question.asked.elapsed());
    let answer = lock(&question.answer);
    let waited = (question.answered).wait_timeout_while(answer, left, |answer| answer.is_none());
    let (answer, _) = waited.unwrap_or_else(PoisonError::into_inner);
    answer.as_ref()?.as_ref().ok().copied()
}

/// The question that is asked already, or a new one.
fn ask(number: u32) -> Option<Arc<Question>> {
    let mut unanswered = lock(&UNANSWERED);
    if let Some(question) = unanswered.get(&number) {
        return Some(Arc::clone(question));
    }
    let question = Arc::new(Question {
        asked: Instant::now(),
        answer: Mutex::default(),
        answered: Condvar::new(),
    });
    let asked = Arc::clone(&question);
    let answer = move || {
        let file_system = status_of(number).and_then(|found| {
            let (_, status) = found.ok_or(io::ErrorKind::NotFound)?;
            Ok(Dev::from_raw(status.device))
        });
        lock(&UNANSWERED).remove(&number);
        *lock(&asked.answer) = Some(file_system);
        asked.answered.notify_all();
    };
    let thread = thread::Builder::new().name("loop-status".to_owned());
    let _ = thread.spawn(answer).ok()?;
    unanswered.insert(number, Arc::clone(&question));
    Some(question)
}
