//! The plan drives a model of a machine, with random files, users, faults and restarts.

use std::path::Path;

use proptest::{collection, prelude::*, sample};

use super::{
    super::{
        applied::Refused,
        desired::{BadDesired, Desired},
        difference::options,
        dry_run::dry_run,
        root::{RootMode, RootOwner},
    },
    *,
};

const FILES: [&str; 4] = ["a", "b", "c", "d"];
const HANDLES: [&str; 3] = ["v1", "v2", "v3"];
const PATHS: [&str; 4] = ["/m/1", "/m/2", "/m/3", "/m/4"];

/// The file of a volume that the model knows.
fn desired(handle: &str, path: &str, options: &str, size: Option<i64>) -> Desired {
    Desired {
        handle: Some(handle.to_owned()),
        source: BTreeMap::from([("image".to_owned(), handle.to_owned())]),
        access: DesiredAccess::Mount {
            fs: None,
            options: vec![options.to_owned()],
            owner: None,
            mode: None,
        },
        path: path.into(),
        read_only: false,
        size: size.map(|size| size.to_string().parse().unwrap()),
        secrets: None,
    }
}

/// What its superblock is to have.
fn superblock(of: &Desired) -> BTreeSet<String> {
    let options = options(of);
    let words = options.fs_options().map(ToString::to_string);
    let ro = is_read_only(of).then(|| "ro".to_owned());
    words.chain(ro).collect()
}

/// A volume as the model's kernel has it.
#[derive(Clone, Debug)]
struct Staged {
    setup: Desired,
    /// The words of its superblock's options, and `ro`.
    superblock: BTreeSet<String>,
    complete: bool,
    /// What its target has of the mount options.
    mounted_as: Option<Desired>,
    /// Whether the lock of a raw volume is held.
    is_locked: bool,
    /// By path: whether it is in use.
    targets: BTreeMap<PathBuf, bool>,
    size: i64,
}

/// A machine, the directory of files, and a manager.
#[derive(Debug)]
struct World {
    files: BTreeMap<&'static str, Result<Desired, BadDesired>>,
    has_marker: bool,
    managed: BTreeMap<String, Staged>,
    /// Staged by others.
    foreign: BTreeSet<String>,
    applied: BTreeMap<String, Applied>,
    attempts: BTreeMap<String, Unfinished>,
    now: Instant,
}

/// How an action ends.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// It fails and has changed nothing.
    Before(Kind),
    /// It fails halfway.
    Midway,
    /// It is done, and the answer is lost.
    After,
}

#[derive(Clone, Debug)]
enum Event {
    Write(&'static str, Desired),
    Spoil(&'static str),
    Remove(&'static str),
    Marker(bool),
    /// A process opens or closes a file at a path.
    Use(&'static str, bool),
    /// Others publish the volume, or unmount a path.
    Publish(&'static str, &'static str),
    Unmount(&'static str),
    /// Others stage or unstage a volume by themselves.
    Foreign(&'static str, bool),
    /// The manager begins what is planned.
    Begin,
    /// The action of a volume ends.
    End(&'static str, Fault),
    /// The agent is killed, with what runs, and starts again.
    Restart(Fault),
    Wait(u64),
}

impl World {
    fn new() -> Self {
        Self {
            files: BTreeMap::new(),
            has_marker: true,
            managed: BTreeMap::new(),
            foreign: BTreeSet::new(),
            applied: BTreeMap::new(),
            attempts: BTreeMap::new(),
            now: Instant::now(),
        }
    }

    fn table(&self) -> DesiredTable {
        let files = (self.files.iter()).map(|(name, file)| ((*name).to_owned(), file.clone()));
        let incomplete = (!self.has_marker).then(|| "no marker".to_owned());
        let applied = (self.applied.iter()).map(|(handle, it)| it.as_file(handle));
        DesiredTable::of(files.collect(), incomplete, &applied.collect())
    }

    fn actual(&self) -> BTreeMap<String, Actual> {
        let one = |handle: &&str| {
            let presence = if let Some(staged) = self.managed.get(*handle) {
                Presence::Managed {
                    staged: staged.complete,
                    targets: staged.targets.keys().cloned().collect(),
                }
            } else if self.foreign.contains(*handle) {
                Presence::Foreign("/others".into())
            } else {
                Presence::Absent
            };
            let applied = self.applied.get(*handle).cloned();
            ((*handle).to_owned(), Actual { applied, presence })
        };
        HANDLES.iter().map(one).collect()
    }

    fn plan(&self) -> Plan {
        plan(&self.table(), &self.actual(), &self.attempts, self.now)
    }

    /// Begins every planned action.
    fn begin(&mut self) {
        let runs = dry_run(&self.table(), &self.actual());
        for (handle, action) in self.plan().actions {
            self.check(&handle, &action);
            assert_eq!(runs[&handle].actions.first(), Some(&action));
            self.attempts
                .insert(handle, Unfinished::Running(action, None));
        }
    }

    /// What must hold whenever an action begins.
    fn check(&self, handle: &str, action: &Action) {
        let running = self.attempts.get(handle);
        assert!(
            !matches!(running, Some(Unfinished::Running(..))),
            "two at once"
        );
        let applied = self.applied.get(handle);
        let wanted = self.table().volumes.get(handle).cloned();
        let destroys = matches!(
            action,
            Action::Unstage | Action::Unpublish(_) | Action::Forget
        );
        assert!(
            !destroys || applied.is_some(),
            "{handle} was not set up: {action}"
        );
        if let (Some(applied), None) = (applied, &wanted) {
            let is_bad = self.files.get(&*applied.name).is_some_and(Result::is_err);
            assert!(
                self.has_marker && !is_bad,
                "{handle} may be wanted: {action}"
            );
        }
        // Options that a killed or refused change left behind may need a new set-up.
        let is_as_applied = wanted
            .as_ref()
            .zip(applied)
            .is_some_and(|(wanted, applied)| {
                let is_settled = applied.in_doubt.is_none() && applied.refused.is_none();
                is_settled && wanted.desired == applied.desired
            });
        assert!(
            !destroys || !is_as_applied,
            "{handle} is wanted like this: {action}"
        );
        if let Action::Unstage = action {
            let staged = self.managed.get(handle).expect("staged");
            assert!(staged.targets.is_empty(), "{handle} is published");
        }
        if let (Action::Unpublish(path), Some(applied)) = (action, applied) {
            assert_eq!(*path, applied.desired.path, "others published it");
        }
    }

    /// Ends a running action.
    fn end(&mut self, handle: &str, fault: Fault) {
        let Some(Unfinished::Running(action, _)) = self.attempts.get(handle).cloned() else {
            return;
        };
        let (kind, done) = match fault {
            Fault::Before(kind) => (Some(kind), Ok(())),
            Fault::Midway => (Some(Kind::Transient), self.run(handle, &action, true)),
            Fault::After => (Some(Kind::Transient), self.run(handle, &action, false)),
            Fault::None => (None, self.run(handle, &action, false)),
        };
        match kind.or(done.err()) {
            None => self.attempts.remove(handle),
            Some(kind) => {
                if let (Action::Reconfigure { options, read_only }, Kind::Invalid) = (&action, kind)
                {
                    let applied = self.applied.get_mut(handle).expect("recorded before");
                    applied.refused = Some(Refused {
                        options: options.clone(),
                        read_only: *read_only,
                        why: String::new(),
                    });
                }
                let failure = Failure::new(action, kind, String::new(), None, self.now);
                (self.attempts).insert(handle.to_owned(), Unfinished::Failed(failure))
            }
        };
    }

    /// What a call of the node agent does.
    fn run(&mut self, handle: &str, action: &Action, midway: bool) -> Result<(), Kind> {
        let published = |managed: &BTreeMap<String, Staged>, path: &PathBuf| {
            (managed.values()).any(|staged| staged.targets.contains_key(path))
        };
        match action {
            Action::Record(_) | Action::Forget if midway => {}
            Action::Record(applied) => {
                let before = self.applied.get(handle).map(|it| it.desired.path.clone());
                // Others may have published it there meanwhile.
                if let Some(before) = before.filter(|before| *before != applied.desired.path) {
                    self.run(handle, &Action::Unpublish(before), false)?;
                }
                self.applied.insert(handle.to_owned(), (**applied).clone());
            }
            Action::Forget => {
                self.applied.remove(handle);
            }
            Action::Stage => {
                let applied = self.applied.get(handle).expect("recorded before");
                if self.foreign.contains(handle) {
                    return Err(Kind::Conflict);
                }
                let staged = self.managed.entry(handle.to_owned()).or_insert(Staged {
                    setup: applied.desired.clone(),
                    superblock: superblock(&applied.desired),
                    complete: false,
                    mounted_as: None,
                    is_locked: false,
                    targets: BTreeMap::new(),
                    size: 1,
                });
                if !is_same_setup(&staged.setup, &applied.desired) {
                    return Err(Kind::Conflict);
                }
                staged.complete = !midway;
            }
            Action::Publish => {
                // A repeat takes the lock of a raw volume again.
                let path = self.applied[handle].desired.path.clone();
                let is_there = (self.managed.get(handle))
                    .is_some_and(|staged| staged.targets.contains_key(&path));
                if !is_there && published(&self.managed, &path) {
                    return Err(Kind::Precondition);
                }
                let staged = self.managed.get_mut(handle).ok_or(Kind::Precondition)?;
                staged.targets.entry(path).or_insert(false);
                let applied = self.applied.get_mut(handle).expect("recorded before");
                staged.mounted_as = Some(applied.desired.clone());
                staged.is_locked = !midway;
                applied.has_options = !midway;
            }
            Action::Remount(options) => {
                // Others may have unmounted it meanwhile: it is published.
                let path = self.applied[handle].desired.path.clone();
                let is_there = (self.managed.get(handle))
                    .is_some_and(|staged| staged.targets.contains_key(&path));
                if !is_there && published(&self.managed, &path) {
                    return Err(Kind::Precondition);
                }
                let applied = self.applied.get_mut(handle).expect("recorded before");
                let staged = self.managed.get_mut(handle).ok_or(Kind::Precondition)?;
                staged.targets.entry(path).or_insert(false);
                let mut now = applied.desired.clone();
                now.access.set_options(options);
                staged.mounted_as = Some(now.clone());
                applied.has_options = !midway;
                if !midway {
                    applied.desired = now;
                }
            }
            Action::Reconfigure { options, read_only } => {
                self.reconfigure(handle, options, *read_only, midway)?;
            }
            Action::Grow(size) => {
                let staged = self.managed.get_mut(handle).ok_or(Kind::NotFound)?;
                staged.size = staged.size.max(size.bytes());
                let applied = self.applied.get_mut(handle).expect("recorded before");
                applied.grown_to = (!midway).then_some(*size).or(applied.grown_to);
            }
            Action::Unpublish(path) => {
                // The lock goes first.
                if let Some(applied) = self.applied.get_mut(handle) {
                    applied.lose_lock();
                }
                if let Some(staged) = self.managed.get_mut(handle) {
                    staged.is_locked = false;
                    if staged.targets.get(path) == Some(&true) {
                        return Err(Kind::InUse);
                    }
                    staged.targets.remove(path);
                }
            }
            Action::Unstage => match self.managed.get_mut(handle) {
                Some(staged) if !staged.targets.is_empty() => return Err(Kind::Precondition),
                Some(staged) if midway => staged.complete = false,
                _ => drop(self.managed.remove(handle)),
            },
        }
        Ok(())
    }

    /// What the call does that changes a mounted file system.
    fn reconfigure(
        &mut self,
        handle: &str,
        options: &[String],
        read_only: bool,
        midway: bool,
    ) -> Result<(), Kind> {
        let before = self.applied.get(handle).expect("recorded before").clone();
        let mut now = before.desired.clone();
        now.access.set_options(options);
        now.read_only = read_only;
        let set = change_in_place(&before, &now).expect("it was planned");
        let applied = self.applied.get_mut(handle).expect("recorded before");
        let in_doubt = applied.in_doubt.get_or_insert_default();
        in_doubt.extend(superblock(&now));
        applied.has_options = false;
        let staged = self.managed.get_mut(handle).ok_or(Kind::Precondition)?;
        for option in set {
            // Keys have one value.
            let key = |word: &str| word.split('=').next() == Some(&*option.key);
            staged.superblock.retain(|word| !key(word));
            let undone = match &*option.key {
                "async" => Some("sync"),
                key => key.strip_prefix("no"),
            };
            let _ = match undone {
                Some(undone) => staged.superblock.remove(undone),
                None => staged.superblock.insert(option.to_string()),
            };
        }
        if is_read_only(&now) {
            staged.superblock.insert("ro".to_owned());
        }
        staged.setup = now;
        if !midway {
            applied.reconfigured(options, read_only);
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Write(name, desired) => drop(self.files.insert(name, Ok(desired))),
            Event::Spoil(name) => {
                let bad = BadDesired::whole("spoilt");
                self.files.insert(name, Err(bad));
            }
            Event::Remove(name) => drop(self.files.remove(name)),
            Event::Marker(is_there) => self.has_marker = is_there,
            Event::Use(path, in_use) => {
                for staged in self.managed.values_mut() {
                    if let Some(target) = staged.targets.get_mut(&PathBuf::from(path)) {
                        *target = in_use;
                    }
                }
            }
            Event::Publish(handle, path) => {
                let mut paths = self.managed.values().flat_map(|it| it.targets.keys());
                if !paths.any(|other| other == Path::new(path))
                    && let Some(staged) = self.managed.get_mut(handle)
                    && staged.complete
                {
                    staged.targets.insert(path.into(), false);
                }
            }
            Event::Unmount(path) => {
                for staged in self.managed.values_mut() {
                    staged.targets.remove(&PathBuf::from(path));
                }
            }
            Event::Foreign(handle, true) if !self.managed.contains_key(handle) => {
                self.foreign.insert(handle.to_owned());
            }
            Event::Foreign(handle, _) => drop(self.foreign.remove(handle)),
            Event::Begin => self.begin(),
            Event::End(handle, fault) => self.end(handle, fault),
            Event::Restart(fault) => {
                for handle in HANDLES {
                    self.end(handle, fault);
                }
                self.attempts.clear();
                self.applied.values_mut().for_each(Applied::lose_lock);
                for staged in self.managed.values_mut() {
                    staged.is_locked = false;
                }
            }
            Event::Wait(seconds) => self.now += Duration::from_secs(seconds),
        }
    }

    /// Others end, and every file can be used: what is desired must come.
    fn settle(&mut self) {
        (self.has_marker, self.foreign) = (true, BTreeSet::new());
        while let Some(bad) = self.table().bad.keys().next() {
            self.files.remove(&**bad);
        }
        for (handle, staged) in &mut self.managed {
            let own = self
                .applied
                .get(handle)
                .map(|applied| &applied.desired.path);
            staged.targets.retain(|path, in_use| {
                *in_use = false;
                Some(path) == own
            });
        }
        for _ in 0..60 {
            for handle in HANDLES {
                self.end(handle, Fault::None);
            }
            let plan = self.plan();
            if plan.actions.is_empty() && plan.due.is_none() {
                break;
            }
            self.now = plan.due.unwrap_or(self.now).max(self.now);
            self.begin();
        }
        let table = self.table();
        assert_eq!(self.plan(), Plan::default(), "{self:#?}");
        let handles: Vec<_> = self.managed.keys().collect();
        assert_eq!(handles, table.volumes.keys().collect::<Vec<_>>());
        for (handle, staged) in &self.managed {
            let wanted = &table.volumes[handle].desired;
            assert!(staged.complete && is_same_setup(&staged.setup, wanted));
            assert_eq!(staged.superblock, superblock(wanted));
            let mounted_as = staged.mounted_as.as_ref().expect("published");
            assert!(is_same_mount(mounted_as, wanted), "{mounted_as:?}");
            assert!(staged.is_locked || wanted.access != DesiredAccess::Raw);
            assert_eq!(staged.targets.keys().collect::<Vec<_>>(), [&wanted.path]);
            assert!(wanted.size.is_none_or(|size| staged.size >= size.bytes()));
        }
    }
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::None),
        1 => sample::select(vec![
            Kind::Transient, Kind::InUse, Kind::Invalid, Kind::Deadline, Kind::Exhausted,
        ]).prop_map(Fault::Before),
        1 => Just(Fault::Midway),
        1 => Just(Fault::After),
    ]
}

fn owner() -> impl Strategy<Value = Option<RootOwner>> {
    prop::option::of((0..2u32).prop_map(|uid| RootOwner { uid, gid: 0 }))
}

fn mode() -> impl Strategy<Value = Option<RootMode>> {
    prop::option::of(sample::select(vec![RootMode(0o700), RootMode(0o755)]))
}

fn event() -> impl Strategy<Value = Event> {
    let (file, handle) = (sample::select(&FILES[..]), sample::select(&HANDLES[..]));
    let path = sample::select(&PATHS[..]);
    let options = sample::select(vec![
        "noatime",
        "sync",
        "noexec",
        "sync,noexec",
        "lazytime,commit=5",
        "commit=9",
        "ro",
    ]);
    // Half of the volumes have the options alone.
    let access = prop_oneof![
        2 => Just(None),
        1 => Just(Some(DesiredAccess::Raw)),
        1 => (owner(), mode()).prop_map(|(owner, mode)| Some(DesiredAccess::Mount {
            fs: None,
            options: Vec::new(),
            owner,
            mode,
        })),
    ];
    let size = prop::option::of(0..3i64);
    let read_only = prop::bool::weighted(0.1);
    let source = prop_oneof![
        6 => Just(None),
        1 => Just(Some(("image", "other"))),
        1 => Just(Some(("backend", "nfs"))),
    ];
    let secrets = prop::option::weighted(0.1, Just(PathBuf::from("/secrets")));
    let fields = (handle.clone(), path.clone(), options, access, source);
    let more = (size, read_only, secrets);
    let any_desired = (fields, more).prop_map(|(fields, (size, read_only, secrets))| {
        let (handle, path, options, access, source) = fields;
        let mut desired = Desired {
            read_only,
            secrets,
            ..desired(handle, path, options, size)
        };
        if let Some(access) = access {
            desired.access = access;
            desired.access.set_options(&[options.to_owned()]);
        }
        if let Some((key, value)) = source {
            desired.source = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        }
        desired
    });
    prop_oneof![
        4 => (file.clone(), any_desired).prop_map(|(file, desired)| Event::Write(file, desired)),
        1 => file.clone().prop_map(Event::Spoil),
        2 => file.prop_map(Event::Remove),
        1 => any::<bool>().prop_map(Event::Marker),
        2 => (path.clone(), any::<bool>()).prop_map(|(path, it)| Event::Use(path, it)),
        1 => (handle.clone(), path.clone()).prop_map(|(it, path)| Event::Publish(it, path)),
        1 => path.prop_map(Event::Unmount),
        1 => (handle.clone(), any::<bool>()).prop_map(|(it, staged)| Event::Foreign(it, staged)),
        9 => Just(Event::Begin),
        12 => (handle, fault()).prop_map(|(handle, fault)| Event::End(handle, fault)),
        1 => fault().prop_map(Event::Restart),
        2 => (0..30u64).prop_map(Event::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn whatever_happens_the_desired_state_comes(events in collection::vec(event(), 0..120)) {
        let mut world = World::new();
        for event in events {
            world.happen(event);
        }
        world.settle();
    }
}

/// A world in which the file `a` asked for volume `v1`, which is there.
fn mounted() -> World {
    let mut world = World::new();
    world.happen(Event::Write("a", desired("v1", "/m/1", "noatime", Some(2))));
    world.settle();
    world
}

/// The file of the volume `v1` with another image.
fn of_other_source(path: &str) -> Desired {
    let mut other = desired("v1", path, "noatime", None);
    other.source.clear();
    other
}

/// The only action of the plan.
fn only(world: &World) -> Action {
    let plan = world.plan();
    assert_eq!(plan.actions.len(), 1, "{plan:?}");
    plan.actions.into_values().next().unwrap()
}

#[test]
fn a_volume_comes_and_goes_step_by_step() {
    let mut world = World::new();
    world.happen(Event::Write("a", desired("v1", "/m/1", "noatime", Some(2))));
    let (mut done, mut foreseen) = (Vec::new(), Vec::new());
    for present in [true, false] {
        if !present {
            world.happen(Event::Remove("a"));
        }
        let run = dry_run(&world.table(), &world.actual())
            .remove("v1")
            .unwrap();
        let why = ["no file asks for it", "a.toml asks for it"];
        assert_eq!(run.reason, why[usize::from(present)]);
        foreseen.extend(run.actions.iter().map(ToString::to_string));
        while !world.plan().actions.is_empty() {
            done.push(only(&world).to_string());
            world.begin();
            world.end("v1", Fault::None);
        }
    }
    let expected = [
        "take over a.toml",
        "attach and mount",
        "publish",
        "grow to 2",
        "unmount from /m/1",
        "unmount and detach",
        "forget",
    ];
    assert_eq!(done, expected);
    assert_eq!(foreseen, expected);
}

#[test]
fn a_dry_run_says_what_changed() {
    let mut world = mounted();
    let run = |world: &World| {
        dry_run(&world.table(), &world.actual())
            .remove("v1")
            .unwrap()
    };
    let ready = run(&world);
    assert!(
        ready.actions.is_empty() && ready.blocked.is_none(),
        "{ready:?}"
    );
    world.happen(Event::Write("a", desired("v1", "/m/2", "sync", Some(4))));
    let changed = run(&world);
    assert_eq!(changed.reason, "a.toml changed: options, path, size");
    let actions: Vec<_> = changed.actions.iter().map(ToString::to_string).collect();
    let expected = [
        "change the file system to sync",
        "unmount from /m/1",
        "take over a.toml",
        "publish",
        "grow to 4",
    ];
    assert_eq!(actions, expected);
    world.happen(Event::Write("a", of_other_source("/m/1")));
    let changed = run(&world);
    assert_eq!(changed.reason, "a.toml changed: source, size");
    let actions: Vec<_> = changed.actions.iter().map(ToString::to_string).collect();
    let expected = [
        "unmount from /m/1",
        "unmount and detach",
        "take over a.toml",
        "attach and mount",
        "publish",
    ];
    assert_eq!(actions, expected);
    world.happen(Event::Publish("v1", "/m/4"));
    let used = run(&world);
    assert_eq!(used.blocked, Some(Blocked::Used("/m/4".into())));
    assert!(used.actions.is_empty(), "{used:?}");
    world.happen(Event::Write("a", desired("v1", "/m/1", "noatime", Some(2))));
    world.happen(Event::Unmount("/m/1"));
    let gone = run(&world);
    assert_eq!(gone.reason, "it is not mounted at /m/1");
    assert_eq!(gone.actions, [Action::Publish]);
}

#[test]
fn options_of_the_mount_change_in_place() {
    let mut world = mounted();
    world.happen(Event::Use("/m/1", true));
    world.happen(Event::Write("a", desired("v1", "/m/1", "noexec", Some(2))));
    let run = dry_run(&world.table(), &world.actual())
        .remove("v1")
        .unwrap();
    let remount = Action::Remount(vec!["noexec".to_owned()]);
    assert_eq!(run.actions, [remount]);
    assert_eq!(run.reason, "a.toml changed: options");
    world.begin();
    world.end("v1", Fault::None);
    assert_eq!(world.plan(), Plan::default());
    // Another spelling of the same.
    world.happen(Event::Write(
        "a",
        desired("v1", "/m/1", "exec,noexec", Some(2)),
    ));
    assert!(matches!(only(&world), Action::Record(_)));
}

#[test]
fn options_of_the_file_system_change_in_place_unless_it_refuses() {
    let mut world = mounted();
    world.happen(Event::Use("/m/1", true));
    let write = |world: &mut World, options: &str| {
        world.happen(Event::Write("a", desired("v1", "/m/1", options, Some(2))));
    };
    write(&mut world, "sync,commit=5");
    let run = dry_run(&world.table(), &world.actual())
        .remove("v1")
        .unwrap();
    let actions: Vec<_> = run.actions.iter().map(ToString::to_string).collect();
    let expected = [
        "change the file system to sync,commit=5",
        "remount with sync,commit=5",
    ];
    assert_eq!(actions, expected);
    // The agent ends before the answer, and the file is as it was.
    world.begin();
    world.happen(Event::Restart(Fault::Midway));
    write(&mut world, "noatime");
    // Nothing says what commit was: that ends with the mount, which is in use.
    assert_eq!(only(&world), Action::Unpublish("/m/1".into()));
    write(&mut world, "commit=5");
    assert!(matches!(only(&world), Action::Reconfigure { .. }));
    world.begin();
    world.end("v1", Fault::None);
    assert_eq!(
        world.managed["v1"].superblock,
        ["commit=5".to_owned()].into()
    );
    // The same where the change only takes options away.
    write(&mut world, "commit=5,sync");
    world.begin();
    world.end("v1", Fault::None);
    write(&mut world, "commit=5");
    world.begin();
    world.happen(Event::Restart(Fault::Midway));
    write(&mut world, "commit=5,sync");
    assert!(matches!(only(&world), Action::Reconfigure { .. }));
    write(&mut world, "commit=5");
    world.begin();
    world.end("v1", Fault::None);

    write(&mut world, "commit=5,data=journal");
    world.begin();
    world.end("v1", Fault::Before(Kind::Invalid));
    assert_eq!(only(&world), Action::Unpublish("/m/1".into()));
    // Another change may do.
    write(&mut world, "commit=5,ro");
    assert!(matches!(only(&world), Action::Reconfigure { .. }));
    world.begin();
    world.end("v1", Fault::None);
    // What is read only may be attached elsewhere.
    write(&mut world, "commit=5");
    assert_eq!(only(&world), Action::Unpublish("/m/1".into()));
}

#[test]
fn nothing_is_undone_while_the_directory_may_not_be_the_one() {
    let mut world = mounted();
    world.happen(Event::Marker(false));
    world.happen(Event::Remove("a"));
    let plan = world.plan();
    assert!(plan.actions.is_empty());
    let Some(Next::Blocked(blocked)) = plan.waiting.get("v1") else {
        panic!("{plan:?}");
    };
    assert!(blocked.to_string().ends_with("no marker"), "{blocked}");
    // A file that was spoilt, or renamed and spoilt, asks for the same as before.
    for name in ["a", "b"] {
        let mut world = mounted();
        world.happen(Event::Remove("a"));
        world.happen(Event::Spoil(name));
        let plan = world.plan();
        assert!(
            plan.actions.is_empty() && plan.waiting.len() == 1,
            "{plan:?}"
        );
    }
}

#[test]
fn a_renamed_file_changes_nothing_but_the_record() {
    let mut world = mounted();
    let file = world.files.remove("a").unwrap().unwrap();
    world.happen(Event::Write("b", file));
    assert!(matches!(only(&world), Action::Record(it) if it.name == "b"));
}

#[test]
fn a_volume_that_others_use_as_well_stays_published() {
    let mut world = mounted();
    world.happen(Event::Publish("v1", "/m/4"));
    for now in [of_other_source("/m/1"), desired("v1", "/m/1", "ro", None)] {
        world.happen(Event::Write("a", now));
        let plan = world.plan();
        assert!(plan.actions.is_empty());
        let used = Blocked::Used("/m/4".into());
        assert_eq!(plan.waiting["v1"], Next::Blocked(used));
    }
    // They may have other options of the file system.
    world.happen(Event::Write("a", desired("v1", "/m/1", "sync", None)));
    assert!(matches!(only(&world), Action::Reconfigure { .. }));
    // Its path may change all the same.
    world.happen(Event::Write("a", desired("v1", "/m/2", "noatime", None)));
    assert_eq!(only(&world), Action::Unpublish("/m/1".into()));
}

#[test]
fn a_volume_of_others_is_left_to_them() {
    let mut world = World::new();
    world.happen(Event::Foreign("v1", true));
    assert_eq!(world.plan(), Plan::default());
    world.happen(Event::Write("a", desired("v1", "/m/1", "sync", None)));
    let foreign = Blocked::Foreign("/others".into());
    assert_eq!(world.plan().waiting["v1"], Next::Blocked(foreign));
    // A lost record: nothing proves whose it is.
    let mut world = mounted();
    world.applied.clear();
    for _ in 0..2 {
        let plan = world.plan();
        assert!(plan.actions.is_empty());
        assert_eq!(plan.waiting["v1"], Next::Blocked(Blocked::Unrecorded));
        world.happen(Event::Remove("a"));
    }
}

#[test]
fn a_failed_action_is_repeated_later_and_later_until_the_file_changes() {
    let mut world = mounted();
    world.happen(Event::Use("/m/1", true));
    world.happen(Event::Remove("a"));
    world.begin();
    world.end("v1", Fault::None);
    let plan = world.plan();
    assert!(plan.actions.is_empty());
    assert_eq!(plan.due, Some(world.now + Duration::from_secs(1)));
    world.happen(Event::Wait(1));
    assert_eq!(only(&world), Action::Unpublish("/m/1".into()));
    // The file is back: there is nothing left to do.
    world.happen(Event::Write("a", desired("v1", "/m/1", "noatime", Some(2))));
    assert_eq!(world.plan(), Plan::default());

    let now = Instant::now();
    let mut failure: Option<Failure> = None;
    let mut pauses = Vec::new();
    for _ in 0..70 {
        let text = "no".to_owned();
        let next = Failure::new(Action::Stage, Kind::Transient, text, failure.as_ref(), now);
        pauses.push((next.repeat - now).as_secs());
        failure = Some(next);
    }
    assert_eq!(pauses[..7], [1, 2, 4, 8, 16, 32, 60]);
    assert_eq!(pauses[69], 60);
    let failure = failure.unwrap();
    let text = String::new();
    let other = Failure::new(Action::Publish, Kind::InUse, text, Some(&failure), now);
    assert_eq!((failure.times, other.times), (70, 1));
}

#[test]
fn two_files_for_one_volume_or_path_leave_the_first_alone() {
    let mut world = World::new();
    world.happen(Event::Write("b", desired("v1", "/m/1", "sync", None)));
    world.settle();
    world.happen(Event::Write("a", desired("v1", "/m/2", "sync", None)));
    world.happen(Event::Write("c", desired("v2", "/m/1", "sync", None)));
    let table = world.table();
    assert_eq!(table.volumes["v1"].name, "b");
    let why: Vec<_> = table.bad.values().map(ToString::to_string).collect();
    let expected = [
        "handle: is that of b.toml as well",
        "path: is that of b.toml as well",
    ];
    assert_eq!(why, expected);
    assert_eq!(world.plan(), Plan::default());
}
