//! The findings of `CheckStorage`, as both agents answer them.

use crate::{
    finding::Finding,
    proto::admin::{CheckStorageResponse, StorageFinding},
};

/// The answer with these findings.
pub fn answer(findings: Vec<Finding>) -> CheckStorageResponse {
    let findings = findings.into_iter().map(|Finding { subject, state }| {
        let (found, remedy) = match state {
            Ok(found) => (found, String::new()),
            Err(fault) => (fault.what, fault.remedy),
        };
        StorageFinding {
            subject,
            found,
            remedy,
        }
    });
    CheckStorageResponse {
        findings: findings.collect(),
    }
}
