//! An agent that is killed while it works.

use std::{
    fs::{self, File},
    path::PathBuf,
    time::Duration,
};

use testkit::{Content, MIB, Rng, crash_at_each_step, loops_over, run, story};
use tonic::Status;

use super::{Machine, all_options_at, image, options_at};

/// Kills the agent at one of its steps, while files come, change and go; then the file is as
/// before for a while, or stays.
#[test]
fn an_agent_that_is_killed_continues() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let node = &machine.node;
        image(sandbox, "steady");
        machine.write("steady", &machine.file("steady", "mount", ""));
        machine.wait("steady", "mounted");
        let steady = Content::new("steady");
        steady.write(&machine.path("steady").join("file"));
        let open = File::open(machine.path("steady").join("file")).unwrap();
        let data = image(sandbox, "data");
        let content = Content::new("data");
        let mut has_content = false;
        let ask = |(state, more): (&str, &str)| match state {
            "gone" => machine.remove("data"),
            _ => machine.write("data", &machine.file("data", "mount", more)),
        };
        crash_at_each_step(node, 22, async |crashing| {
            let mut before = ("gone", "");
            for asked in [
                ("mounted", ""),
                ("mounted", "options = ['noexec']"),
                ("gone", ""),
            ] {
                ask(asked);
                let (state, more) = asked;
                let wait = async || {
                    let args = ["wait", "data", "--for", state, "--timeout", "300ms"];
                    let (code, _, said) = machine.operator.run(&args);
                    (code == 0)
                        .then_some(())
                        .ok_or_else(|| Status::unavailable(said))
                };
                let opposite = async || {
                    ask(before);
                    machine.wait("data", before.0);
                    ask(asked);
                };
                crashing.complete(state, wait, opposite).await;
                before = asked;
                let file = machine.path("data").join("file");
                if state == "mounted" {
                    if has_content {
                        content.assert_in(&file);
                    } else {
                        content.write(&file);
                        has_content = true;
                    }
                    assert_eq!(
                        options_at(&machine.path("data")).contains("noexec"),
                        !more.is_empty()
                    );
                } else {
                    assert!(!machine.path("data").exists());
                    assert!(loops_over(&data).is_empty());
                }
                steady.assert_in(&machine.path("steady").join("file"));
            }
            crashing.stop_crashing().await;
        })
        .await;
        drop(open);
        machine.remove("steady");
        machine.wait("steady", "gone");
        machine.node.assert_clean().await;
    });
}

/// A volume that a file asks for now and then.
struct Wanted {
    name: &'static str,
    access: &'static str,
    image: PathBuf,
    content: Content,
    /// What its file asks for, if there is one.
    file: Option<Setup>,
}

#[derive(Clone, Copy)]
struct Setup {
    has_moved: bool,
    option: &'static str,
}

const FIRST: Setup = Setup {
    has_moved: false,
    option: "",
};

impl Wanted {
    fn path(&self, machine: &Machine, has_moved: bool) -> PathBuf {
        machine
            .path(if has_moved { "moved" } else { "" })
            .join(self.name)
    }

    /// Writes or removes its file.
    fn ask(&mut self, machine: &Machine, file: Option<Setup>) {
        match (file, self.file) {
            (Some(Setup { has_moved, option }), _) => {
                let more = match option {
                    "" => String::new(),
                    "read-only" => "read-only = true".to_owned(),
                    option => format!("options = ['{option}']"),
                };
                let text = machine.file(self.name, self.access, &more);
                let at = |path: PathBuf| format!("path = '{}'", path.display());
                let path = at(self.path(machine, has_moved));
                let text = text.replace(&at(machine.path(self.name)), &path);
                machine.write(self.name, &text);
            }
            (None, Some(_)) => machine.remove(self.name),
            (None, None) => {}
        }
        self.file = file;
    }

    /// Writes what its file asks for at random, or removes the file.
    fn ask_at_random(&mut self, machine: &Machine, rng: &mut Rng) {
        let options = match self.access {
            "raw" => &["", "read-only"][..],
            _ => &["", "noexec", "sync", "read-only"],
        };
        let setup = Setup {
            has_moved: rng.below(2) == 0,
            option: options[rng.below(options.len())],
        };
        self.ask(machine, (rng.below(4) > 0).then_some(setup));
    }

    /// Waits until it is as its file asks, and asserts it.
    fn assert_as_asked(&self, machine: &Machine) {
        let is_wanted = self.file.is_some();
        machine.wait(self.name, if is_wanted { "mounted" } else { "gone" });
        assert_eq!(loops_over(&self.image).len(), usize::from(is_wanted));
        for has_moved in [false, true] {
            let path = self.path(machine, has_moved);
            let Some(setup) = self.file.filter(|file| file.has_moved == has_moved) else {
                assert!(!path.exists(), "{}", path.display());
                continue;
            };
            if self.access == "raw" {
                let map = machine.node.run_dir.join("devices").join(self.name);
                let mapped = fs::read_dir(map).unwrap().map(|user| user.unwrap().path());
                let mapped: Vec<_> = mapped.map(|user| fs::read_link(user).unwrap()).collect();
                assert_eq!(mapped, [&*path]);
                self.content.assert_at(&path, MIB);
                let is_read_only = run(&["blockdev", "--getro", path.to_str().unwrap()]);
                assert_eq!(is_read_only.trim() == "1", setup.option == "read-only");
                continue;
            }
            self.content.assert_in(&path.join("file"));
            let (mount, superblock) = all_options_at(&path);
            let all: Vec<_> = mount.split(',').chain(superblock.split(',')).collect();
            for (option, shown) in [("noexec", "noexec"), ("sync", "sync"), ("read-only", "ro")] {
                let has = all.contains(&shown);
                assert_eq!(has, setup.option == option, "{}: {all:?}", self.name);
            }
        }
    }
}

/// Kills the agent at random moments, while files come, change and go.
#[test]
fn what_files_ask_for_comes_after_any_number_of_kills() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let node = &machine.node;
        fs::create_dir(machine.path("moved")).unwrap();
        let mut rng = Rng::new();
        let volumes = [
            ("one", "mount"),
            ("two", "mount"),
            ("three", "mount"),
            ("disk", "raw"),
        ];
        let mut volumes = volumes.map(|(name, access)| Wanted {
            name,
            access,
            image: image(sandbox, name),
            content: Content::new(name),
            file: None,
        });
        for volume in &mut volumes {
            volume.ask(&machine, Some(FIRST));
            machine.wait(volume.name, "mounted");
            let path = volume.path(&machine, false);
            match volume.access {
                "raw" => volume.content.write_at(&path, MIB).unwrap(),
                _ => volume.content.write(&path.join("file")),
            }
        }
        for _ in 0..12 {
            for _ in 0..=rng.below(3) {
                volumes[rng.below(4)].ask_at_random(&machine, &mut rng);
            }
            // The agent reads the directory once that has been unchanged for 0.3 s.
            let moment = u64::try_from(rng.below(1000)).unwrap();
            tokio::time::sleep(Duration::from_millis(moment)).await;
            node.kill9().await;
            volumes[rng.below(4)].ask_at_random(&machine, &mut rng);
            node.restart().await;
        }
        for volume in &volumes {
            volume.assert_as_asked(&machine);
        }
        // Of those that were removed, too, the data is there.
        for volume in &mut volumes {
            volume.ask(&machine, Some(FIRST));
        }
        for volume in &volumes {
            volume.assert_as_asked(&machine);
        }
        for volume in &mut volumes {
            volume.ask(&machine, None);
        }
        for volume in &volumes {
            volume.assert_as_asked(&machine);
        }
        node.assert_clean().await;
    });
}
