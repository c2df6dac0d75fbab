//! The controller's own service: the copies that it makes, which CSI does not list before
//! they are complete.

use tonic::{Request, Response, Status};

use super::super::call::observed;
use crate::{
    proto::admin::{
        CopyUnderWay, ListCopiesRequest, ListCopiesResponse,
        controller_admin_server::ControllerAdmin,
    },
    provision::images::{Copies, CopyKind, CopyProgress},
};

/// Serves the calls of uringctl.
#[derive(Debug)]
pub struct CopyService(Copies);

impl CopyService {
    /// Of these copies.
    pub fn new(copies: Copies) -> Self {
        Self(copies)
    }
}

#[tonic::async_trait]
impl ControllerAdmin for CopyService {
    async fn list_copies(
        &self,
        _: Request<ListCopiesRequest>,
    ) -> Result<Response<ListCopiesResponse>, Status> {
        observed("ListCopies", "", async {
            let copies = self.0.list().into_iter().map(under_way).collect();
            Ok(ListCopiesResponse { copies })
        })
        .await
    }
}

fn under_way(copy: CopyProgress) -> CopyUnderWay {
    let age = copy.age.map(|age| age.as_millis());
    CopyUnderWay {
        kind: match copy.target.kind {
            CopyKind::Volume => "volume",
            CopyKind::Snapshot => "snapshot",
        }
        .to_owned(),
        name: copy.target.name,
        id: copy.target.handle,
        source_id: copy.target.source,
        pool: copy.target.pool,
        copied_bytes: copy.copied,
        size_bytes: copy.bytes,
        waits: age.is_none(),
        age_ms: age.map_or(0, |age| u64::try_from(age).unwrap_or(u64::MAX)),
    }
}
