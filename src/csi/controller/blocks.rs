//! The SnapshotMetadata service: the blocks of snapshots, for backups of what has changed. A
//! message is one page; the next page is read once the caller takes it.

use std::pin::Pin;

use futures_util::stream::{self, Stream, StreamExt as _};
use tonic::{Request, Response, Status};

use super::{
    super::validate::{self, invalid},
    Controller, answered, signed, taken,
};
use crate::{
    proto::csi::{
        self as wire, BlockMetadata, BlockMetadataType, snapshot_metadata_server::SnapshotMetadata,
    },
    provision::{BlockPage, BlockRequest, Stores},
};

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The fields of both requests that are no handle.
fn block_request(
    snapshot: String,
    base: Option<String>,
    (from, max): (i64, i32),
    secrets: std::collections::HashMap<String, String>,
) -> Result<BlockRequest, Status> {
    let from = u64::try_from(from)
        .map_err(|_| Status::out_of_range("starting_offset: must not be negative"))?;
    let max = usize::try_from(max).map_err(|_| invalid("max_results", "must not be negative"))?;
    validate::secrets(&secrets)?;
    Ok(BlockRequest {
        snapshot,
        base,
        from,
        max,
        secrets: secrets.into(),
    })
}

/// The blocks of a page, as both answers have them.
fn blocks(page: &BlockPage) -> Vec<BlockMetadata> {
    let block = |range: &std::ops::Range<u64>| BlockMetadata {
        byte_offset: signed(range.start),
        size_bytes: signed(range.end - range.start),
    };
    page.blocks.iter().map(block).collect()
}

/// All pages from the first on, as messages.
fn messages<T: Send + 'static>(
    stores: Stores,
    what: BlockRequest,
    first: &BlockPage,
    message: fn(&BlockPage) -> T,
) -> Messages<T> {
    let (told, next) = (message(first), first.next);
    let more = stream::try_unfold(next, move |next| {
        let (stores, mut what) = (stores.clone(), what.clone());
        async move {
            let Some(from) = next else { return Ok(None) };
            what.from = from;
            let page = stores.snapshot_blocks(what).await?;
            Ok(Some((message(&page), page.next)))
        }
    });
    Box::pin(stream::once(async { Ok(told) }).chain(more))
}

impl Controller {
    async fn first_page(
        &self,
        what: Result<BlockRequest, Status>,
    ) -> Result<(BlockRequest, BlockPage), Status> {
        let what = what?;
        let page = self.stores.snapshot_blocks(what.clone()).await?;
        Ok((what, page))
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for Controller {
    type GetMetadataAllocatedStream = Messages<wire::GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<wire::GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<wire::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let (request, caller) = taken(request);
        let id = request.snapshot_id;
        answered("GetMetadataAllocated", &id, caller, async {
            validate::id("snapshot_id", &id)?;
            let place = (request.starting_offset, request.max_results);
            let what = block_request(id.clone(), None, place, request.secrets);
            let (what, first) = self.first_page(what).await?;
            let stores = self.stores.clone();
            Ok(messages(stores, what, &first, |page| {
                wire::GetMetadataAllocatedResponse {
                    block_metadata_type: BlockMetadataType::VariableLength.into(),
                    volume_capacity_bytes: signed(page.bytes),
                    block_metadata: blocks(page),
                }
            }))
        })
        .await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<wire::GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let (request, caller) = taken(request);
        let (base, id) = (request.base_snapshot_id, request.target_snapshot_id);
        answered("GetMetadataDelta", &id, caller, async {
            validate::id("base_snapshot_id", &base)?;
            validate::id("target_snapshot_id", &id)?;
            let place = (request.starting_offset, request.max_results);
            let what = block_request(id.clone(), Some(base), place, request.secrets);
            let (what, first) = self.first_page(what).await?;
            let stores = self.stores.clone();
            Ok(messages(stores, what, &first, |page| {
                wire::GetMetadataDeltaResponse {
                    block_metadata_type: BlockMetadataType::VariableLength.into(),
                    volume_capacity_bytes: signed(page.bytes),
                    block_metadata: blocks(page),
                }
            }))
        })
        .await
    }
}
