//! A cluster of three monitors and three OSDs loses one of each while it is in use. The
//! images have their data in an erasure-coded pool.

use testkit::{Writer, eventually};

use super::*;

impl Home {
    /// Repeats a call that ends by a transient error, as Kubernetes does.
    async fn until_done<T>(
        &self,
        what: &str,
        call: impl AsyncFn(&Stores) -> Result<T, ProvisionError>,
    ) -> T {
        eventually(what, async || match call(&self.rbd).await {
            Ok(done) => Some(done),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Transient, "{error}");
                None
            }
        })
        .await
    }

    fn content(&self, image: &str) -> Vec<u8> {
        let file = self.dir.path().join("content");
        let _ = std::fs::remove_file(&file);
        let spec = format!("{}/{image}", self.pool);
        self.cluster.rbd(&["export", &spec, file.to_str().unwrap()]);
        std::fs::read(&file).unwrap()
    }
}

#[tokio::test]
#[ignore = "seven daemons for a minute: make test-matrix"]
async fn a_controller_outlives_a_monitor_and_an_osd() {
    let Some(cluster) = TestCluster::own_of_three() else {
        return;
    };
    let home = Home::over(cluster);
    let data = home.cluster.erasure_coded_pool();
    let of_class = |name: &str, source: Option<ContentSource>| {
        let mut new = home.volume(name, 8 * MIB);
        let pool = ("dataPool".to_owned(), data.clone());
        new.parameters.extend([pool]);
        new.source = source;
        new
    };
    let source = home.make(of_class("source", None)).await;
    let image = &source.context["imageName"];
    let writer = Writer::start(&home.cluster, &home.pool, image);
    home.cluster.lose_daemons();

    let snapshot = home.snapshot("snapshot", &source.handle);
    let taken = home.until_done("a snapshot", async |rbd| {
        rbd.create_snapshot(snapshot.clone()).await
    });
    let taken = taken.await.handle;
    let from = ContentSource::Snapshot(taken.clone());
    let restored = of_class("restored", Some(from));
    let restored = home.until_done("a copy", async |rbd| {
        rbd.create_volume(restored.clone()).await
    });
    let restored = restored.await;
    let range = Range {
        required: 16 * MIB,
        limit: 0,
    };
    let grown = home.until_done("a larger volume", async |rbd| {
        let handle = restored.handle.clone();
        rbd.expand_volume(handle, range, home.secrets()).await
    });
    assert_eq!(grown.await, 16 * MIB);
    let copy = &restored.context["imageName"];
    let first = home.content(copy);
    assert!(first.iter().any(|&byte| byte != 0), "nothing was written");

    assert!(writer.end());
    assert_eq!(home.content(copy), first);
    let info = home
        .cluster
        .rbd(&["info", "--format=json", &format!("{}/{copy}", home.pool)]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["data_pool"], *data, "{info}");
    home.until_done("deleted", async |rbd| {
        rbd.delete_snapshot(taken.clone(), home.secrets()).await
    })
    .await;
    for handle in [&restored.handle, &source.handle] {
        home.until_done("deleted", async |rbd| {
            rbd.delete_volume(handle.clone(), home.secrets()).await
        })
        .await;
    }
    assert_eq!(home.images(), [""; 0]);
}
