use proptest::prelude::*;

use super::*;

#[test]
fn addresses_have_one_spelling() {
    for (given, canonical) in [
        ("nbd://Host/disk", "nbd://host:10809/disk"),
        ("nbd://host", "nbd://host:10809/"),
        ("nbd://10.0.0.1:/a/b.img", "nbd://10.0.0.1:10809/a/b.img"),
        ("nbd://[FD00::1]:5/x%20y", "nbd://[fd00::1]:5/x%20y"),
        (
            "nbd+unix:///d?socket=/run/%6Ebd.sock",
            "nbd+unix:///d?socket=/run/nbd.sock",
        ),
    ] {
        let export: Export = given.parse().unwrap();
        assert_eq!(export.to_string(), canonical);
        assert_eq!(canonical.parse(), Ok(export));
    }
}

#[test]
fn an_invalid_address_is_refused_with_the_reason() {
    for (given, why) in [
        ("", "begins with"),
        ("http://host/x", "begins with"),
        ("nbds://host/x", "TLS"),
        ("nbds+unix:///x?socket=/s", "TLS"),
        ("nbd:///x", "no host"),
        ("nbd://user@host/x", "letters"),
        ("nbd://host:0/x", "port 0"),
        ("nbd://host:70000/x", "port"),
        ("nbd://host:+5/x", "port"),
        ("nbd://[::1]x/x", "port"),
        ("nbd://[fe80::1%eth0]/x", "letters"),
        ("nbd://host/x?tls-certificates=/d", "parameters"),
        ("nbd://host/x#y", "fragment"),
        ("nbd://host/%ff", "UTF-8"),
        ("nbd://host/%00", "NUL"),
        ("nbd+unix://host/x?socket=/s", "no host"),
        ("nbd+unix:///x", "socket"),
        ("nbd+unix:///x?socket=s", "absolute"),
        ("nbd+unix:///x?socket=/s&more=1", "nothing more"),
    ] {
        let error = given.parse::<Export>().unwrap_err().to_string();
        assert!(error.contains(why), "{given}: {error}");
    }
    let long = format!("nbd://host/{}", "x".repeat(LONGEST));
    assert!(long.parse::<Export>().is_err());
}

#[test]
fn a_server_is_an_address_without_an_export() {
    for (given, canonical) in [
        ("Host", "nbd://host:10809/"),
        ("10.0.0.1:5", "nbd://10.0.0.1:5/"),
        ("[fd00::1]", "nbd://[fd00::1]:10809/"),
        ("nbd://host:5", "nbd://host:5/"),
        ("nbd+unix:///?socket=/s", "nbd+unix:///?socket=/s"),
    ] {
        let server: Server = given.parse().unwrap();
        assert_eq!(server.to_string(), canonical);
        assert_eq!(canonical.parse(), Ok(server));
    }
    for (given, why) in [
        ("", "no host"),
        ("host:x", "no number"),
        ("fd00::1", "brackets"),
        ("a b", "letters"),
        ("nbd://host/disk", "names an export"),
        ("nbds://host", "TLS"),
        ("nbd+unix:///", "socket"),
    ] {
        let error = given.parse::<Server>().unwrap_err().to_string();
        assert!(error.contains(why), "{given}: {error}");
    }
}

proptest! {
    #[test]
    fn any_text_is_a_server_or_is_refused(text in "(nbd(\\+unix)?://)?.{0,60}") {
        if let Ok(server) = text.parse::<Server>() {
            prop_assert_eq!(server.to_string().parse(), Ok(server));
        }
    }

    #[test]
    fn any_name_and_socket_come_back(name in "[^\0]{0,80}", socket in "/[^\0]{0,25}") {
        let export = Export::new(Server::unix(&socket).unwrap(), &name).unwrap();
        prop_assert_eq!(export.to_string().parse::<Export>(), Ok(export.clone()));
        prop_assert_eq!(&String::from(export.server().clone()).parse::<Server>().unwrap(), export.server());
        let json = serde_json::to_string(&export).unwrap();
        prop_assert_eq!(serde_json::from_str::<Export>(&json).unwrap(), export);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(nbd(s|\\+unix)?://)?.{0,60}") {
        if let Ok(export) = text.parse::<Export>() {
            prop_assert_eq!(export.to_string().parse(), Ok(export));
        }
    }
}
