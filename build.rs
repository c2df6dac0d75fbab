//! Compiles the protobuf definitions without protoc, and generates a `Debug` that redacts
//! secrets for every message that has some.

use std::{collections::BTreeMap, env, error::Error, fmt::Write as _, fs, path::PathBuf};

use prost_reflect::{DescriptorPool, MessageDescriptor};

const PROTOS: [&str; 8] = [
    "csi/v1/csi.proto",
    "csi_addons/encryptionkeyrotation.proto",
    "csi_addons/fence.proto",
    "csi_addons/identity.proto",
    "csi_addons/reclaimspace.proto",
    "csi_addons/replication.proto",
    "uring_csi/v1/admin.proto",
    "uring_csi/holder/v1/holder.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let out = PathBuf::from(env::var("OUT_DIR")?);

    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(PROTOS)?;
    let descriptors = compiler.file_descriptor_set();
    // For gRPC server reflection.
    fs::write(
        out.join("descriptors.bin"),
        compiler.encode_file_descriptor_set(),
    )?;

    let pool = DescriptorPool::decode(compiler.encode_file_descriptor_set().as_slice())?;
    let secret = pool
        .get_extension_by_name("csi.v1.csi_secret")
        .ok_or("csi.proto does not define the csi_secret option")?;
    let with_secrets: Vec<_> = pool
        .all_messages()
        .filter(|message| {
            message
                .fields()
                .any(|field| field.options().has_extension(&secret))
        })
        .collect();

    let mut config = tonic_prost_build::Config::new();
    config.skip_debug(with_secrets.iter().map(|m| format!(".{}", m.full_name())));
    tonic_prost_build::configure().compile_fds_with_config(descriptors, config)?;

    // One file for each package, as for the messages.
    let mut debugs = BTreeMap::<_, String>::new();
    for message in &with_secrets {
        let file = debugs.entry(message.package_name()).or_default();
        write_debug(file, message, &secret)?;
    }
    for (package, debugs) in debugs {
        fs::write(out.join(format!("{package}.redacted.rs")), debugs)?;
    }
    Ok(())
}

/// Writes a `Debug` that shows the length of a secret, the size of a map of secrets, a
/// volume context without its tokens, and every other field.
fn write_debug(
    out: &mut String,
    message: &MessageDescriptor,
    secret: &prost_reflect::ExtensionDescriptor,
) -> Result<(), Box<dyn Error>> {
    if message.parent_message().is_some() || message.oneofs().next().is_some() {
        return Err(format!(
            "{}: nested messages and oneofs with secrets are not redacted yet",
            message.full_name()
        )
        .into());
    }
    let name = message.name();
    writeln!(out, "impl ::core::fmt::Debug for {name} {{")?;
    writeln!(
        out,
        "    fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {{"
    )?;
    writeln!(out, "        f.debug_struct({name:?})")?;
    for field in message.fields() {
        let field_name = field.name();
        if field.options().has_extension(secret) {
            writeln!(
                out,
                "            .field({field_name:?}, &super::Redacted(self.{field_name}.len()))"
            )?;
        } else if field_name == "volume_context" {
            writeln!(
                out,
                "            .field({field_name:?}, &super::RedactedContext(&self.{field_name}))"
            )?;
        } else {
            writeln!(
                out,
                "            .field({field_name:?}, &self.{field_name})"
            )?;
        }
    }
    writeln!(out, "            .finish()\n    }}\n}}")?;
    Ok(())
}
