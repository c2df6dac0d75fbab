//! Checks of storage that an operator asks for. A place that hangs takes one thread,
//! however often they ask.

use std::{
    collections::BTreeMap,
    fmt,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared, join_all},
};

use super::Lanes;
use crate::finding::Finding;

/// An inspection that takes longer is reported; it goes on.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// A check of one place. It may block.
pub struct Inspection {
    place: String,
    look: Box<dyn FnOnce() -> Vec<Finding> + Send>,
}

impl Inspection {
    /// An inspection by `look`, whose findings may be of several parts of the place.
    pub fn new(
        place: impl Into<String>,
        look: impl FnOnce() -> Vec<Finding> + Send + 'static,
    ) -> Self {
        Self {
            place: place.into(),
            look: Box::new(look),
        }
    }
}

impl fmt::Debug for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Inspection").field(&self.place).finish()
    }
}

type Looking = Shared<BoxFuture<'static, Vec<Finding>>>;

/// Runs inspections, one at a time of each place.
#[derive(Clone, Debug)]
pub struct Inspections {
    lanes: Lanes,
    /// The last of each place.
    begun: Arc<Mutex<BTreeMap<String, Looking>>>,
}

impl Inspections {
    /// They run on `lanes`.
    pub fn new(lanes: Lanes) -> Self {
        Self {
            lanes,
            begun: Arc::default(),
        }
    }

    /// Runs all at once, each joined to one of the same place that is under way.
    pub async fn run(&self, inspections: Vec<Inspection>) -> Vec<Finding> {
        self.run_within(ANSWER_WITHIN, inspections).await
    }

    async fn run_within(&self, time: Duration, inspections: Vec<Inspection>) -> Vec<Finding> {
        let each = inspections.into_iter().map(|inspection| {
            let place = inspection.place.clone();
            let looking = self.begin(inspection);
            async move {
                let in_time = tokio::time::timeout(time, looking).await;
                in_time.unwrap_or_else(|_| {
                    vec![Finding::faulty(
                        place,
                        format!("it has not answered for {} s", time.as_secs()),
                        "look at its disk or server, and at the kernel's log (dmesg)",
                    )]
                })
            }
        });
        join_all(each).await.concat()
    }

    fn begin(&self, inspection: Inspection) -> Looking {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        // One that has ended has an old result.
        if let Some(last) = begun.get(&inspection.place)
            && last.clone().now_or_never().is_none()
        {
            return last.clone();
        }
        let looking = self.lanes.run("", "inspect", inspection.look);
        let place = inspection.place.clone();
        // A panic ends this one alone.
        let looking = AssertUnwindSafe(looking).catch_unwind().map(|found| {
            let what = "its check failed by a defect of this program";
            found.unwrap_or_else(|_| vec![Finding::faulty(place, what, "see the agent's log")])
        });
        let looking = looking.boxed().shared();
        begun.insert(inspection.place, looking.clone());
        looking
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn a_place_that_hangs_is_reported_and_takes_one_thread() {
        let lanes = Lanes::new(2);
        let inspections = Inspections::new(lanes.clone());
        let (go_on, wait) = channel::<()>();
        let hangs = Inspection::new("bad", move || {
            let _ = wait.recv();
            vec![Finding::usable("bad", "of the first")]
        });
        let good = Inspection::new("good", || vec![Finding::usable("good", "there")]);
        let soon = Duration::from_millis(200);
        let found = inspections.run_within(soon, vec![hangs, good]).await;
        assert_eq!(found[1], Finding::usable("good", "there"));
        let fault = found[0].state.clone().unwrap_err();
        assert!(fault.what.contains("has not answered"), "{fault:?}");

        let second = || Inspection::new("bad", || vec![Finding::usable("bad", "of the second")]);
        for _ in 0..5 {
            let found = inspections.run_within(soon, vec![second()]).await;
            assert!(found[0].state.is_err(), "{found:?}");
        }
        assert!(lanes.threads() <= 2, "{} threads", lanes.threads());
        let joined = inspections.begin(second());
        go_on.send(()).unwrap();
        assert_eq!(joined.await, [Finding::usable("bad", "of the first")]);
        let found = inspections.run(vec![second()]).await;
        assert_eq!(found, [Finding::usable("bad", "of the second")]);

        let panics = Inspection::new("bad", || panic!("a defect"));
        let found = inspections.run(vec![panics]).await;
        assert!(found[0].state.is_err(), "{found:?}");
        let found = inspections.run(vec![second()]).await;
        assert_eq!(found, [Finding::usable("bad", "of the second")]);
    }
}
