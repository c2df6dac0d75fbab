use proptest::{collection, option, prelude::*};

use super::*;

const DATA: &str = r#"
handle = "static-1"
size = "10Gi"
secrets = "/etc/uring-csi/ceph"

[source]
backend = "loop"
pool = "fast"
image = "data.img"

[mount]
path = "/srv/data"
fs = "xfs"
options = ["noatime"]
owner = "999:0"
mode = "0750"
read-only = false
"#;

#[test]
fn a_file_has_every_key() {
    let source = [("backend", "loop"), ("pool", "fast"), ("image", "data.img")];
    let expected = Desired {
        handle: Some("static-1".to_owned()),
        source: source
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into_iter()
            .collect(),
        access: DesiredAccess::Mount {
            fs: Some("xfs".to_owned()),
            options: vec!["noatime".to_owned()],
            owner: Some(RootOwner { uid: 999, gid: 0 }),
            mode: Some(RootMode(0o750)),
        },
        path: "/srv/data".into(),
        read_only: false,
        size: Some("10Gi".parse().unwrap()),
        secrets: Some("/etc/uring-csi/ceph".into()),
    };
    assert_eq!(parse("data", DATA).unwrap(), expected);
    assert_eq!(expected.handle("data"), "static-1");
    let raw = "source = { backend = 'nbd' }\nraw.path = '/srv/disk'";
    let raw = parse("disk", raw).unwrap();
    assert_eq!(raw.access, DesiredAccess::Raw);
    assert_eq!(raw.handle("disk"), "disk");
}

#[test]
fn a_bad_file_is_refused_by_field_and_line() {
    let errors = [
        ("size = \"10Gi\"", "size = \"ten\"", "line 3: ", "ten"),
        ("size =", "sise =", "line 3: ", "sise"),
        ("read-only", "read_only", "line 17: ", "read_only"),
        ("read-only = false", "read-only = true", "", "size: "),
        (
            "read-only = false",
            "read-only = 1",
            "line 17: ",
            "read-only",
        ),
        ("pool = \"fast\"", "pool = 4", "line 8: ", "pool"),
        ("[mount]", "[mount", "line 11: ", "[mount"),
        ("path = \"/srv/data\"\n", "", "", "path"),
        ("\"/srv/data\"", "\"srv/data\"", "", "path: srv/data"),
        (
            "\"/srv/data\"",
            "\"/srv/../data\"",
            "",
            "path: /srv/../data",
        ),
        ("\"/srv/data\"", "\"/srv/data/\"", "", "path: /srv/data/"),
        ("\"/srv/data\"", "\"/srv//data\"", "", "path: /srv//data"),
        ("\"/etc/uring-csi/ceph\"", "\"ceph\"", "", "secrets: "),
        ("999:0", "postgres", "line 15: ", "postgres"),
        ("999:0", "4294967295:0", "line 15: ", "owner"),
        ("0750", "0790", "line 16: ", "mode"),
        ("0750", "10750", "line 16: ", "mode"),
        ("static-1", "", "", "handle: "),
        ("[mount]", "[raw]", "line 13: ", "fs"),
        ("[mount]", "raw.path = '/x'\n[mount]", "line 11: ", "raw"),
    ];
    for (from, to, line, words) in errors {
        assert!(DATA.contains(from), "{from}");
        let error = parse("data", &DATA.replace(from, to)).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with(line) && error.contains(words),
            "{to}: {error}"
        );
    }
    for (text, words) in [
        ("", "source"),
        ("source = {}", "[mount] or [raw]"),
        ("source = {}\nraw.path = '/x'\nmount.path = '/x'", "both"),
    ] {
        let error = parse("data", text).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    assert!(parse("", DATA).is_err());
}

#[test]
fn an_error_shows_no_secret() {
    let mistakes = [
        ("[mount]", "[mount]\nuserKey = 'S3CRET'"),
        ("[mount]", "[mount]\nsecrets = { userKey = 'S3CRET' }"),
        ("/etc/uring-csi/ceph", "S3CRET/1, expected x=="),
        ("[\"noatime\"]", "'S3CRET\", expected x'"),
        ("false", "'S3CRET'"),
        ("[source]", "raw = 'S3CRET'\n[source]"),
    ];
    for (from, to) in mistakes {
        let text = DATA.replace(from, to);
        let error = parse("data", &text).unwrap_err().to_string();
        assert!(!error.contains("S3CRET"), "{error}");
    }
    let error = parse("data", &DATA.replace("false", "'S3CRET'")).unwrap_err();
    assert_eq!(
        error.why,
        "invalid type: string, expected a boolean: read-only"
    );
}

fn path() -> impl Strategy<Value = PathBuf> {
    "/[a-zA-Z0-9 _.é-]{0,8}[a-z](/[a-z][a-z.]{0,8}){0,3}".prop_map(PathBuf::from)
}

prop_compose! {
    fn any_desired()(
        handle in option::of("[^\\p{Cc}]{1,30}"),
        source in collection::btree_map(".{0,9}", ".{0,9}", 0..4),
        mount in option::of((option::of(".{0,9}"), collection::vec(".{0,9}", 0..3))),
        owner in option::of((0..u32::MAX, 0..u32::MAX)),
        mode in option::of(0..0o10000u32),
        path in path(),
        read_only: bool,
        size in option::of(0..i64::MAX),
        secrets in option::of(path()),
    ) -> Desired {
        Desired {
            handle,
            source,
            access: match mount {
                None => DesiredAccess::Raw,
                Some((fs, options)) => DesiredAccess::Mount {
                    fs,
                    options,
                    owner: owner.map(|(uid, gid)| RootOwner { uid, gid }),
                    mode: mode.map(RootMode),
                },
            },
            path,
            read_only,
            size: size.filter(|_| !read_only).map(|size| size.to_string().parse().unwrap()),
            secrets,
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back(desired in any_desired()) {
        let text = toml::to_string(&desired).unwrap();
        prop_assert_eq!(parse("data", &text), Ok(desired.clone()), "{}", text);
        let json = serde_json::to_string(&desired).unwrap();
        prop_assert_eq!(serde_json::from_str::<Desired>(&json).unwrap(), desired);
    }

    /// No text panics, also not one that ends early; one that is accepted is the same once
    /// it is written again.
    #[test]
    fn any_text_is_read_or_refused(cut in 0..DATA.len(), at in 0..DATA.len(), with in ".{0,3}") {
        let mut text = DATA[..cut].to_owned();
        if let Some(rest) = text.get(at.min(cut)..) {
            let rest = rest.to_owned();
            text.truncate(at.min(cut));
            text += &with;
            text += &rest;
        }
        if let Ok(desired) = parse("data", &text) {
            prop_assert_eq!(parse("data", &toml::to_string(&desired).unwrap()), Ok(desired));
        }
    }
}
