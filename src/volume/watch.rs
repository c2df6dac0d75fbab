//! Checks of what this node depends on: its pools, its list of Ceph clusters. A failure
//! may pass by itself, so the checks are repeated.

use std::{future::Future, pin::Pin, time::Duration};

use super::Node;
use crate::{device::Check, lane::Lanes};

/// A check that takes longer is reported; it goes on.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// The checks, and those under way.
pub struct Checks {
    lanes: Lanes,
    answer_within: Duration,
    watched: Vec<RunningCheck>,
}

/// A check with its run under way, so that a pool that hangs takes one thread.
struct RunningCheck {
    check: Check,
    under_way: Option<Look>,
}

type Look = Pin<Box<dyn Future<Output = Result<(), String>>>>;

impl Node {
    /// The checks of this node.
    pub fn watch(&self) -> Checks {
        Checks::new(self.lanes.clone(), self.backends.checks(), ANSWER_WITHIN)
    }
}

impl Checks {
    fn new(lanes: Lanes, checks: Vec<Check>, answer_within: Duration) -> Self {
        let watched = |check| RunningCheck {
            check,
            under_way: None,
        };
        Self {
            lanes,
            answer_within,
            watched: checks.into_iter().map(watched).collect(),
        }
    }

    /// Runs all checks at once and describes the failures; `None` if there are none.
    pub async fn what_is_wrong(&mut self) -> Option<String> {
        for watched in &mut self.watched {
            let check = watched.check.clone();
            let lanes = &self.lanes;
            watched
                .under_way
                .get_or_insert_with(|| Box::pin(lanes.run("", "check", move || check.run())));
        }
        let mut wrong = Vec::new();
        let mut left = self.answer_within;
        for watched in &mut self.watched {
            let begun = std::time::Instant::now();
            let look = watched.under_way.as_mut().expect("begun above");
            match tokio::time::timeout(left, look).await {
                Ok(found) => {
                    watched.under_way = None;
                    wrong.extend(found.err());
                }
                Err(_) => wrong.push(format!(
                    "{} has not answered for {} s",
                    watched.check.what,
                    self.answer_within.as_secs()
                )),
            }
            left = left.saturating_sub(begun.elapsed());
        }
        (!wrong.is_empty()).then(|| wrong.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, mpsc::channel};

    use super::*;
    use crate::ring;

    #[test]
    fn hung_and_failing_checks_are_reported_until_both_recover() {
        let (go_on, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let missing = Arc::new(Mutex::new(true));
        let there = missing.clone();
        let checks = vec![
            Check::new("the hung pool".to_owned(), move || {
                wait.lock()
                    .unwrap()
                    .recv()
                    .map_err(|error| error.to_string())
            }),
            Check::new("another".to_owned(), move || {
                let is_missing = *there.lock().unwrap();
                if is_missing {
                    return Err("it is missing".to_owned());
                }
                Ok(())
            }),
        ];
        ring::start(async move {
            let lanes = Lanes::new(2);
            let mut watch = Checks::new(lanes.clone(), checks, Duration::from_millis(100));
            for _ in 0..3 {
                let said = watch.what_is_wrong().await.unwrap();
                assert!(said.contains("the hung pool has not answered"), "{said}");
                assert!(said.contains("it is missing"), "{said}");
            }
            assert!(lanes.threads() <= 2, "one thread for what hangs");
            *missing.lock().unwrap() = false;
            watch.answer_within = Duration::from_secs(60);
            go_on.send(()).unwrap();
            assert_eq!(watch.what_is_wrong().await, None);
        })
        .unwrap();
    }
}
