use futures_util::{FutureExt as _, future::ready};

use super::{super::images::Copies, *};
use crate::{
    Kind,
    pool::{Pool, Pools, Scope},
};

const CEPH_S: &str = "0001-0004-ceph-0000000000000004-36eaa70e-eb63-11ea-8e79-246e96907f74";
const POOL_S: &str = "vol.shared.main.00000000-0000-0000-0000-000000006f1c";

fn over(dir: &std::path::Path) -> Stores {
    let pool = Pool {
        name: "main".to_owned(),
        dir: dir.to_owned(),
        scope: Scope::Shared,
        mounted: false,
    };
    let pools = Pools::new([pool]).unwrap();
    let images = ImageStore::new(
        pools,
        None,
        "boot".to_owned(),
        Copies::new(4, 1),
        &Lanes::new(2),
    );
    Stores::new(Some(images.into()), None, None, &Lanes::new(1))
}

#[test]
fn a_handle_or_a_class_selects_its_store() {
    assert_eq!(StoreKind::of_handle(CEPH_S), Some(StoreKind::Rbd));
    assert_eq!(StoreKind::of_handle(POOL_S), Some(StoreKind::Images));
    let snapshot = POOL_S.replace("vol.", "snap.");
    assert_eq!(StoreKind::of_handle(&snapshot), Some(StoreKind::Images));
    assert_eq!(StoreKind::of_handle("any"), None);
    let directory = StoreKind::of_handle("srv#share#pvc-1##");
    assert_eq!(directory, Some(StoreKind::Nfs));
    assert_eq!(
        StoreKind::of_handle("a/b/c"),
        None,
        "it may be any driver's"
    );
    let class = |name: &str, value: &str| {
        StoreKind::of_class(&HashMap::from([(name.to_owned(), value.to_owned())]))
    };
    assert_eq!(class("clusterID", "ceph"), Some(StoreKind::Rbd));
    assert_eq!(class("backend", "rbd"), Some(StoreKind::Rbd));
    assert_eq!(class("backend", "nbd"), Some(StoreKind::Images));
    assert_eq!(class("pool", "main"), Some(StoreKind::Images));
    assert_eq!(class("backend", "nfs"), Some(StoreKind::Nfs));
    assert_eq!(class("server", "srv"), Some(StoreKind::Images));
    let nfs = [("Server", "srv"), ("share", "/a")];
    let nfs = nfs.map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(StoreKind::of_class(&nfs.into()), Some(StoreKind::Nfs));
    assert_eq!(StoreKind::of_class(&HashMap::new()), None);
}

#[tokio::test]
async fn a_volume_of_an_absent_store_is_refused_not_reported_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let pools_alone = over(dir.path());
    let none = Secrets::default;
    let refused = pools_alone.delete_volume(CEPH_S.to_owned(), none()).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), Kind::Precondition);
    assert!(refused.to_string().contains("--ceph-config"), "{refused}");
    pools_alone
        .delete_volume("never ours".to_owned(), none())
        .await
        .unwrap();
    let room = CapacityRequest {
        parameters: HashMap::from([("clusterID".to_owned(), "ceph".to_owned())]),
        ..CapacityRequest::default()
    };
    let refused = pools_alone.capacity(room).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Invalid);
    let nothing = Stores::new(None, None, None, &Lanes::new(1));
    let refused = nothing.get_volume(POOL_S.to_owned()).await.unwrap_err();
    assert!(refused.to_string().contains("--pool"), "{refused}");
}

#[tokio::test]
async fn a_listing_continues_in_the_store_that_its_token_names() {
    let dir = tempfile::tempdir().unwrap();
    let stores = over(dir.path());
    let list = async |from: Option<&str>, ends: bool| {
        let what = ListRequest {
            from: from.map(str::to_owned),
            max: 2,
            omitted: None,
        };
        stores
            .page(what, |_, what| {
                let entries = vec![what.from];
                let next = (!ends).then(|| "id".to_owned());
                ready(Ok(Page { entries, next })).boxed()
            })
            .await
    };
    let first = list(None, false).await.unwrap();
    assert_eq!(first.next.as_deref(), Some("images.id"));
    let second = list(first.next.as_deref(), true).await.unwrap();
    assert_eq!(second.entries, [Some("id".to_owned())]);
    assert_eq!(second.next, None);
    for bad in ["id", "rbd.id", ""] {
        let refused = list(Some(bad), true).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::InUse, "{bad}");
    }
}
