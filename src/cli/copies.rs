//! The copies that the controller makes, for lists and on a terminal.

use serde::Serialize;

use super::{context::Context, error::CliError};
use crate::{
    proto::admin::{CopyUnderWay, ListCopiesRequest},
    size::human_bytes,
};

/// A volume that is being copied, as printed.
#[derive(Debug, Serialize)]
pub struct CopyAnswer {
    name: String,
    /// The id that it will have.
    volume_id: String,
    source_id: String,
    pool: String,
    capacity_bytes: u64,
    copied_bytes: u64,
    /// Whether it waits for its turn.
    waits: bool,
    progress: String,
}

impl From<CopyUnderWay> for CopyAnswer {
    fn from(copy: CopyUnderWay) -> Self {
        Self {
            progress: progress(&copy),
            name: copy.name,
            volume_id: copy.id,
            source_id: copy.source_id,
            pool: copy.pool,
            capacity_bytes: copy.size_bytes,
            copied_bytes: copy.copied_bytes,
            waits: copy.waits,
        }
    }
}

impl CopyAnswer {
    /// `data-2: 3.1Gi of 50Gi copied`.
    pub fn text(&self) -> String {
        format!("{}: {}", self.name, self.progress)
    }
}

/// `3.1Gi of 50Gi copied`.
pub fn progress(copy: &CopyUnderWay) -> String {
    if copy.waits {
        return "waits for other copies".to_owned();
    }
    let [copied, size] = [copy.copied_bytes, copy.size_bytes].map(human_bytes);
    format!("{copied} of {size} copied")
}

impl Context {
    /// The copies that the controller makes now, of a kind: `volume` or `snapshot`.
    pub async fn copies(&self, kind: &str) -> Vec<CopyUnderWay> {
        let listed = self.list_copies().await;
        // Earlier controllers do not serve that, and another error shows in the list itself.
        let mut copies = listed.unwrap_or_default();
        copies.retain(|copy| copy.kind == kind);
        copies
    }

    async fn list_copies(&self) -> Result<Vec<CopyUnderWay>, CliError> {
        let answer = self
            .controller_admin(
                "list copies",
                ListCopiesRequest {},
                async |mut client, request| client.list_copies(request).await,
            )
            .await?;
        Ok(answer.copies)
    }

    /// Waits for `work`, which makes a volume or snapshot of that name, showing `label` and
    /// how far the controller has copied it.
    pub async fn showing_copy<T>(
        &self,
        label: &str,
        kind: &str,
        name: &str,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        let step = async || {
            let copies = self.copies(kind).await;
            let copy = copies.iter().find(|copy| copy.name == name);
            copy.map(progress)
        };
        self.showing_step(label, step, work).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_shows_how_far_it_is() {
        let mut copy = CopyUnderWay {
            name: "data-2".to_owned(),
            copied_bytes: 3 << 30,
            size_bytes: 50 << 30,
            ..Default::default()
        };
        let answer = CopyAnswer::from(copy.clone());
        assert_eq!(answer.text(), "data-2: 3Gi of 50Gi copied");
        copy.waits = true;
        assert_eq!(progress(&copy), "waits for other copies");
    }
}
