//! AWS Signature Version 4, of a POST to the root of a service without a query.
//!
//! <https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html>

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::{
    digest::{hex, sha256_hex},
    secret::Secret,
};

/// Whose requests are signed, and for which service.
pub struct Signer<'a> {
    pub key_id: &'a str,
    pub key: &'a Secret,
    pub region: &'a str,
    pub service: &'a str,
}

impl Signer<'_> {
    /// The value of the header Authorization. `headers` are all that are signed, in the order
    /// of their lower-case names, without blanks around their values; `time` is the one of
    /// `x-amz-date` among them.
    pub fn authorize(&self, headers: &[(&str, &str)], time: &str, body: &str) -> String {
        let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        let lines = headers
            .iter()
            .map(|(name, value)| [*name, ":", *value, "\n"]);
        let lines = Zeroizing::new(lines.flatten().collect::<String>());
        let request = Zeroizing::new(format!(
            "POST\n/\n\n{}\n{names}\n{}",
            *lines,
            sha256_hex(body)
        ));
        let day = time.split('T').next().unwrap_or_default();
        let scope = format!("{day}/{}/{}/aws4_request", self.region, self.service);
        let text = format!(
            "AWS4-HMAC-SHA256\n{time}\n{scope}\n{}",
            sha256_hex(&request)
        );
        let secret = Zeroizing::new(format!("AWS4{}", self.key.reveal()));
        let mut key = Zeroizing::new(secret.as_bytes().to_vec());
        for part in [day, self.region, self.service, "aws4_request"] {
            key = mac(&key, part);
        }
        let signature = hex(&mac(&key, &text));
        format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
            self.key_id
        )
    }
}

fn mac(key: &[u8], text: &str) -> Zeroizing<Vec<u8>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length is taken");
    mac.update(text.as_bytes());
    Zeroizing::new(mac.finalize().into_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of AWS's test suite for Signature Version 4: `post-vanilla`,
    /// `post-header-key-sort` and `post-x-www-form-urlencoded`.
    #[test]
    fn signatures_are_those_of_the_test_suite() {
        let key = Secret::new("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".to_owned());
        let signer = Signer {
            key_id: "AKIDEXAMPLE",
            key: &key,
            region: "us-east-1",
            service: "service",
        };
        let time = "20150830T123600Z";
        let host = ("host", "example.amazonaws.com");
        let date = ("x-amz-date", time);
        let form = ("content-type", "application/x-www-form-urlencoded");
        let check = |headers: &[(&str, &str)], body, names, signature| {
            assert_eq!(
                signer.authorize(headers, time, body),
                format!(
                    "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
                     SignedHeaders={names}, Signature={signature}"
                )
            );
        };
        check(
            &[host, date],
            "",
            "host;x-amz-date",
            "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
        );
        check(
            &[host, ("my-header1", "value1"), date],
            "",
            "host;my-header1;x-amz-date",
            "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c",
        );
        check(
            &[form, host, date],
            "Param1=value1",
            "content-type;host;x-amz-date",
            "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
        );
    }
}
