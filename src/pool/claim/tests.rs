use proptest::prelude::*;

use super::*;
use crate::pool::Scope;

const IMAGE: &str = "disk.img";

fn pool() -> (tempfile::TempDir, Pool) {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool {
        name: "p".to_owned(),
        dir: dir.path().to_owned(),
        scope: Scope::Shared,
        mounted: false,
    };
    (dir, pool)
}

fn by(node: &str, boot: &str, access: Sharing) -> Claim {
    Claim {
        node_id: node.to_owned(),
        boot_id: boot.to_owned(),
        volume_id: String::new(),
        access,
        read_only: false,
    }
}

#[test]
fn an_exclusive_claim_keeps_others_out_until_it_is_given_back() {
    let (_dir, pool) = pool();
    let (a, b) = (
        by("a", "1", Sharing::Exclusive),
        by("b", "1", Sharing::Shared),
    );
    assert_eq!(claim(&pool, IMAGE, &a).unwrap(), Done::Now);
    assert_eq!(claim(&pool, IMAGE, &a).unwrap(), Done::Already);
    let held = claim(&pool, IMAGE, &b).unwrap_err();
    assert!(
        matches!(&held, ClaimError::OwnedBy { node, .. } if node == "a"),
        "{held}"
    );
    assert_eq!(owners(&pool, IMAGE).unwrap(), [a]);
    assert_eq!(claimed_by(&pool, "a").unwrap(), [IMAGE]);
    assert_eq!(release(&pool, IMAGE, "a").unwrap(), Done::Now);
    assert_eq!(release(&pool, IMAGE, "a").unwrap(), Done::Already);
    assert_eq!(claim(&pool, IMAGE, &b).unwrap(), Done::Now);
    assert!(claimed_by(&pool, "a").unwrap().is_empty());
}

#[test]
fn shared_claims_stand_side_by_side_and_keep_an_exclusive_one_out() {
    let (_dir, pool) = pool();
    for node in ["a", "b", "c"] {
        assert_eq!(
            claim(&pool, IMAGE, &by(node, "1", Sharing::Shared)).unwrap(),
            Done::Now
        );
    }
    // An exclusive claim of `a` is refused, and its old claim is kept.
    claim(&pool, IMAGE, &by("a", "1", Sharing::Exclusive)).unwrap_err();
    assert_eq!(owners(&pool, IMAGE).unwrap().len(), 3);
    assert_eq!(
        claim(&pool, IMAGE, &by("a", "1", Sharing::Shared)).unwrap(),
        Done::Already
    );
}

#[test]
fn an_own_claim_is_never_weakened_and_is_put_back() {
    let (_dir, pool) = pool();
    let held = by("a", "1", Sharing::Exclusive);
    assert_eq!(claim(&pool, IMAGE, &held).unwrap(), Done::Now);
    let reader = Claim {
        read_only: true,
        ..by("a", "1", Sharing::Readers)
    };
    assert_eq!(claim(&pool, IMAGE, &reader).unwrap(), Done::Already);
    assert_eq!(owners(&pool, IMAGE).unwrap(), std::slice::from_ref(&held));

    let renamed = Claim {
        volume_id: "other".to_owned(),
        ..reader
    };
    let dir = pool.open_dir().unwrap();
    let (done, before) = claim_in(&pool, dir.as_fd(), IMAGE, &renamed).unwrap();
    assert_eq!((done, before.as_ref()), (Done::Now, Some(&held)));
    let now = own(&pool, IMAGE, "a").unwrap().unwrap();
    let expected = Claim {
        volume_id: "other".to_owned(),
        ..held.clone()
    };
    assert_eq!(now, expected);
    put_back(&pool, IMAGE, "a", before).unwrap();
    assert_eq!(claim(&pool, IMAGE, &held).unwrap(), Done::Already);
    put_back(&pool, IMAGE, "a", None).unwrap();
    assert!(own(&pool, IMAGE, "a").unwrap().is_none());
}

#[test]
fn an_own_claim_that_another_process_replaced_is_read() {
    let (_dir, pool) = pool();
    let mine = by("a", "1", Sharing::Exclusive);
    assert_eq!(claim(&pool, IMAGE, &mine).unwrap(), Done::Now);
    assert_eq!(own(&pool, IMAGE, "a").unwrap().as_ref(), Some(&mine));
    let theirs = Claim {
        volume_id: "other".to_owned(),
        ..mine.clone()
    };
    let path = marker_path(&pool, IMAGE, "a");
    let _: File = write(&pool, &path, &theirs, ClaimState::Held).unwrap();
    assert_eq!(own(&pool, IMAGE, "a").unwrap(), Some(theirs));
    fs::remove_file(&path).unwrap();
    assert_eq!(own(&pool, IMAGE, "a").unwrap(), None);
}

#[test]
fn an_own_claim_of_an_earlier_boot_or_unreadable_is_replaced() {
    let (_dir, pool) = pool();
    assert_eq!(
        claim(&pool, IMAGE, &by("a", "1", Sharing::Exclusive)).unwrap(),
        Done::Now
    );
    assert_eq!(
        claim(&pool, IMAGE, &by("a", "2", Sharing::Exclusive)).unwrap(),
        Done::Now
    );
    fs::write(marker_path(&pool, IMAGE, "a"), "").unwrap();
    assert_eq!(
        claim(&pool, IMAGE, &by("a", "2", Sharing::Exclusive)).unwrap(),
        Done::Now
    );
    // A malformed claim of another node is an error that names the file, which is kept.
    fs::write(marker_path(&pool, IMAGE, "b"), "{").unwrap();
    let error = claim(&pool, IMAGE, &by("c", "1", Sharing::Exclusive)).unwrap_err();
    assert!(
        matches!(&error, ClaimError::Corrupt { path, .. } if path.exists()),
        "{error}"
    );
    assert!(!marker_path(&pool, IMAGE, "c").exists());
}

#[test]
fn at_most_one_concurrent_exclusive_claim_succeeds() {
    let (_dir, pool) = pool();
    let holding: usize = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8)
            .map(|n| {
                let pool = &pool;
                scope.spawn(move || {
                    let claimed = claim(
                        pool,
                        IMAGE,
                        &by(&format!("node{n}"), "1", Sharing::Exclusive),
                    );
                    match claimed {
                        Ok(_) => 1,
                        Err(ClaimError::OwnedBy { .. }) => 0,
                        Err(other) => panic!("{other}"),
                    }
                })
            })
            .collect();
        asking.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert!(holding <= 1);
    assert_eq!(owners(&pool, IMAGE).unwrap().len(), holding);
}

#[test]
fn a_controller_s_claim_ends_with_its_draft() {
    let (_dir, pool) = pool();
    let boot = boot_id().unwrap();
    let copying = ControllerClaim::new(&pool, &boot, Sharing::Readers).unwrap();
    copying.take(&pool, IMAGE).unwrap();

    let writer = by("a", "1", Sharing::Shared);
    let error = claim(&pool, IMAGE, &writer).unwrap_err();
    assert!(
        matches!(error, ClaimError::UsedByController { .. }),
        "{error}"
    );
    let reader = Claim {
        read_only: true,
        ..writer.clone()
    };
    assert_eq!(claim(&pool, IMAGE, &reader).unwrap(), Done::Now);
    assert_eq!(owners(&pool, IMAGE).unwrap(), [reader]);
    drop(copying);
    assert_eq!(claim(&pool, IMAGE, &writer).unwrap(), Done::Now);
    forget(&pool, IMAGE).unwrap();
    assert!(!claims_dir(&pool, IMAGE).exists());
}

#[test]
fn in_a_local_pool_claims_of_other_boots_are_ignored() {
    let (_dir, mut pool) = pool();
    pool.scope = Scope::Local;
    assert_eq!(
        claim(&pool, IMAGE, &by("a", "1", Sharing::Exclusive)).unwrap(),
        Done::Now
    );
    fs::write(marker_path(&pool, IMAGE, "cut short"), "").unwrap();
    assert_eq!(
        claim(&pool, IMAGE, &by("b", "2", Sharing::Exclusive)).unwrap(),
        Done::Now
    );
}

proptest! {
    #[test]
    fn an_unreadable_claim_is_an_error_and_stays(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let (_dir, pool) = pool();
        let path = marker_path(&pool, IMAGE, "x");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &bytes).unwrap();
        let corrupt = matches!(owners(&pool, IMAGE), Err(ClaimError::Corrupt { .. }));
        prop_assert!(corrupt);
        prop_assert_eq!(fs::read(&path).unwrap(), bytes);
    }
}

#[test]
fn a_claim_of_another_boot_alone_names_uringctl_release() {
    let (_dir, pool) = pool();
    let holder = by("a", "1", Sharing::Exclusive);
    assert_eq!(claim(&pool, IMAGE, &holder).unwrap(), Done::Now);
    for (boot_id, is_named) in [("1", false), ("2", true)] {
        let other = by("b", boot_id, Sharing::Exclusive);
        let said = claim(&pool, IMAGE, &other).unwrap_err().to_string();
        assert!(said.contains("\"a\"") && said.contains("unstage"), "{said}");
        assert!(said.contains("uringctl volumes"), "{said}");
        assert_eq!(said.contains("uringctl release"), is_named, "{said}");
        assert!(!said.contains("--confirm"), "{said}");
    }
}
