//! librados and librbd, loaded when they are first needed.
//!
//! The build needs nothing of Ceph, and a node or a controller without RBD volumes runs
//! without it. So the tables of [`rados`](self::rados) and [`rbd`](self::rbd) declare the
//! functions by hand, and `dlsym` finds them. All of them are in Ceph 16.2 (Pacific), the
//! oldest supported release, and a library without one is too old, unless a single feature
//! needs it; both libraries have kept their SONAME and the layout of their
//! structures since then.
//!
//! A loaded library stays loaded: it has threads, and the tables keep pointers to its
//! functions.

use std::{
    ffi::{c_int, c_void},
    sync::OnceLock,
};

use libloading::Library;

pub(super) mod rados;
pub(super) mod rbd;

/// The functions of both libraries.
#[derive(Debug)]
pub struct Libraries {
    pub(super) rados: rados::Functions,
    pub(super) rbd: rbd::Functions,
}

/// A library, or a function of it, is missing.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MissingLibrary {
    /// The dynamic linker does not find it, or cannot load it.
    #[error("{library} cannot be loaded ({reason}); install the package {package}")]
    Library {
        /// Its SONAME.
        library: &'static str,
        /// Debian's name of the package; other distributions have similar names.
        package: &'static str,
        /// The dynamic linker's error.
        reason: String,
    },
    /// It is older than Ceph 16.2.
    ///
    /// Remedy: install a newer librados2 or librbd1, of Ceph 16.2 or later, in the program's image.
    #[error("{library} has no {function}: install {package} of Ceph 16.2 or newer")]
    TooOld {
        /// Its SONAME.
        library: &'static str,
        /// Debian's name of the package.
        package: &'static str,
        /// The first function that is missing.
        function: &'static str,
    },
}

impl Libraries {
    /// Loads both libraries, once for the process; the next call repeats a failure.
    pub fn load() -> Result<&'static Self, MissingLibrary> {
        static LOADED: OnceLock<Libraries> = OnceLock::new();
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let rados = rados::Functions::load()?;
        let rbd = rbd::Functions::load()?;
        Ok(LOADED.get_or_init(|| {
            end_at_once();
            Self { rados, rbd }
        }))
    }
}

/// Makes the process exit without running destructors. The libraries' destructors would
/// free what their threads, and calls on lanes, still use, and the process would end by
/// SIGSEGV or SIGABRT. Nothing here needs a destructor: a repeat finishes an interrupted
/// call, as after a crash.
///
/// Handlers of glibc's `on_exit(3)` run in the reverse order of their registration, so this
/// one runs before those that the libraries have registered so far: some when they were
/// loaded, more when they first connected.
pub(super) fn end_at_once() {
    unsafe extern "C" {
        fn on_exit(
            handler: unsafe extern "C" fn(c_int, *mut c_void),
            argument: *mut c_void,
        ) -> c_int;
    }
    unsafe extern "C" fn end(status: c_int, _: *mut c_void) {
        // SAFETY: it only ends the process.
        unsafe { libc::_exit(status) }
    }
    // SAFETY: the handler uses no argument, and code is never unloaded.
    unsafe { on_exit(end, std::ptr::null_mut()) };
}

/// Opens a library, which is never closed.
fn open(library: &'static str, package: &'static str) -> Result<&'static Library, MissingLibrary> {
    // SAFETY: the libraries' initialisers set up their own state alone, and
    // nothing is ever unloaded.
    let opened = unsafe { Library::new(library) };
    match opened {
        Ok(opened) => {
            keep_openssl(&opened);
            Ok(Box::leak(Box::new(opened)))
        }
        Err(reason) => Err(MissingLibrary::Library {
            library,
            package,
            reason: reason.to_string(),
        }),
    }
}

/// Makes OpenSSL, if the library is linked with it, register no exit handler. OpenSSL
/// would register it when a thread of librados first encrypts, later than [`end_at_once`],
/// so it would run first; a thread that encrypts afterwards throws, which aborts the
/// process.
fn keep_openssl(library: &Library) {
    /// `OPENSSL_INIT_NO_ATEXIT`, since OpenSSL 1.1.1.
    const NO_ATEXIT: u64 = 0x0008_0000;
    type Init = unsafe extern "C" fn(options: u64, settings: *const c_void) -> c_int;

    // SAFETY: the type is that of `<openssl/crypto.h>`. The symbol is also looked for
    // in the libraries that this one is linked with.
    if let Ok(init) = unsafe { library.get::<Init>(b"OPENSSL_init_crypto\0") } {
        // SAFETY: the settings may be null. A failure shows when OpenSSL is used.
        unsafe { init(NO_ATEXIT, std::ptr::null()) };
    }
}

/// Defines a table: a structure of function pointers, and the function that fills it. Without
/// one of the `optional` functions, which one feature needs, only that feature fails, with an
/// error that names the function.
macro_rules! table {
    (
        $library:literal, $package:literal;
        $( $(#[$attribute:meta])* fn $function:ident( $( $arg:ident: $type:ty ),* $(,)? ) $( -> $result:ty )?; )*
        optional {
            $( fn $option:ident( $( $option_arg:ident: $option_type:ty ),* $(,)? ) $( -> $option_result:ty )?; )*
        }
    ) => {
        /// The functions, by their names in the header.
        #[derive(Debug)]
        #[allow(clippy::struct_field_names, reason = "the names are the library's")]
        pub(in crate::ceph::client) struct Functions {
            $( $(#[$attribute])* pub $function: unsafe extern "C" fn( $( $arg: $type ),* ) $( -> $result )?, )*
            $( $option: Option<unsafe extern "C" fn( $( $option_arg: $option_type ),* ) $( -> $option_result )?>, )*
        }

        impl Functions {
            pub(super) fn load() -> Result<Self, super::MissingLibrary> {
                let library = super::open($library, $package)?;
                Ok(Self {
                    $( $(#[$attribute])* $function: {
                        let name = concat!(stringify!($function), "\0");
                        // SAFETY: the type is that of the header of Ceph 16.2,
                        // which newer releases of the same SONAME keep.
                        let found = unsafe { library.get(name.as_bytes()) };
                        *found.map_err(|_| super::MissingLibrary::TooOld {
                            library: $library,
                            package: $package,
                            function: stringify!($function),
                        })?
                    }, )*
                    $( $option: {
                        let name = concat!(stringify!($option), "\0");
                        // SAFETY: as above.
                        let found = unsafe { library.get(name.as_bytes()) };
                        found.ok().map(|found| *found)
                    }, )*
                })
            }

            $(
                pub fn $option(&self) -> Result<
                    unsafe extern "C" fn( $( $option_type ),* ) $( -> $option_result )?,
                    super::MissingLibrary,
                > {
                    self.$option.ok_or(super::MissingLibrary::TooOld {
                        library: $library,
                        package: $package,
                        function: stringify!($option),
                    })
                }
            )*
        }
    };
}

use table;

#[cfg(test)]
mod tests {
    use super::*;

    mod partial {
        use std::ffi::c_int;

        table! {
            "libc.so.6", "libc6";

            fn getpid() -> c_int;
            optional {
                fn getppid() -> c_int;
                fn rbd_of_a_later_release(image: u64, name: u64) -> c_int;
            }
        }

        impl Functions {
            pub fn loaded() -> Self {
                Self::load().unwrap()
            }
        }
    }

    #[test]
    fn only_the_feature_of_a_missing_optional_function_fails() {
        let functions = partial::Functions::loaded();
        // SAFETY: neither takes anything.
        let both = unsafe { ((functions.getpid)(), (functions.getppid().unwrap())()) };
        assert_ne!(both.0, both.1);
        let error = functions.rbd_of_a_later_release().unwrap_err().to_string();
        assert!(error.contains("rbd_of_a_later_release"), "{error}");
    }

    #[test]
    fn both_libraries_are_found() {
        let first = Libraries::load().unwrap();
        assert!(std::ptr::eq(first, Libraries::load().unwrap()));
    }

    #[test]
    fn a_missing_library_names_its_package() {
        let error = open("libmissing.so.9", "libmissing9").unwrap_err();
        let error = error.to_string();
        assert!(error.contains("libmissing.so.9"), "{error}");
        assert!(
            error.ends_with("install the package libmissing9"),
            "{error}"
        );
    }
}
