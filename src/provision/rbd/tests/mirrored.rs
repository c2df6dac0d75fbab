//! A volume at two sites, whose daemons (`rbd-mirror`) copy it: fail-over, a loss, and the way
//! back.

use testkit::{MirrorDaemon, eventually, mirror_pool};

use super::{
    replication::{enable, promote},
    *,
};
use crate::{
    ceph::client::rbd::{self as images, Image, Mirroring, OpenMode},
    provision::{Replicated, ReplicationChange},
};

/// The volume of one site as the other, which its handle does not name, knows it.
struct Sites {
    here: Home,
    there: Home,
    volume: VolumeInfo,
    daemons: Vec<MirrorDaemon>,
}

impl Sites {
    async fn new() -> Option<Self> {
        let here = Home::new()?;
        let other = TestCluster::own()?;
        if !mirror_pool(&here.pool, &here.cluster, &other) {
            return None;
        }
        let mut there = Home::over(other);
        there.pool.clone_from(&here.pool);
        there.configure(&["other"]);
        let ids = [&here, &there].map(|home| home.io().pool_id().to_string());
        let mapping = serde_json::json!([{
            "clusterIDMapping": {"ceph": "other"},
            "RBDPoolIDMapping": [{&ids[0]: &ids[1]}],
        }]);
        let file = there.dir.path().join("cluster-mapping.json");
        std::fs::write(file, mapping.to_string()).unwrap();
        let volume = here.make(here.volume("mirrored", MIB)).await;
        let mut sites = Self {
            here,
            there,
            volume,
            daemons: Vec::new(),
        };
        sites.start_daemons();
        Some(sites)
    }

    fn start_daemons(&mut self) {
        let clusters = [&self.here.cluster, &self.there.cluster];
        self.daemons = clusters.map(MirrorDaemon::start).into();
    }

    fn image(&self) -> &str {
        &self.volume.context["imageName"]
    }

    fn role(&self, home: &Home) -> Mirroring {
        let image = Image::open(&home.io(), self.image(), OpenMode::ReadOnly);
        image.unwrap().mirroring().unwrap()
    }

    fn id(&self, home: &Home) -> Option<String> {
        images::image_id(&home.io(), self.image()).unwrap()
    }

    /// Writes, and has the other site copy it.
    fn write(&self, home: &Home, text: &str) {
        let path = format!("{}/{}", home.pool, self.image());
        let file = home.dir.path().join("data");
        std::fs::write(&file, format!("{text:<4096}")).unwrap();
        // rbd writes to an existing image only by a diff or a device.
        let script = "import rados, rbd, sys\n\
            conf, pool, name, data = sys.argv[1:]\n\
            with rados.Rados(conffile=conf, name='client.admin') as cluster:\n\
            \x20with cluster.open_ioctx(pool) as pool, rbd.Image(pool, name) as image:\n\
            \x20 image.write(open(data, 'rb').read(), 0)\n";
        let conf = home.cluster.dir().join("ceph.conf");
        let (conf, file) = (conf.to_str().unwrap(), file.to_str().unwrap());
        let write = [
            "/usr/bin/python3",
            "-c",
            script,
            conf,
            &home.pool,
            self.image(),
            file,
        ];
        testkit::run(&write);
        home.cluster.rbd(&["mirror", "image", "snapshot", &path]);
    }

    /// The text that was written last, as that site has it.
    fn text(&self, home: &Home) -> Option<String> {
        let file = home.dir.path().join("copy");
        let _ = std::fs::remove_file(&file);
        self.id(home)?;
        let path = format!("{}/{}", home.pool, self.image());
        // A secondary image is read at the snapshot that was copied completely.
        home.cluster.rbd(&["export", &path, file.to_str().unwrap()]);
        let text = std::fs::read(&file).unwrap();
        let text = String::from_utf8_lossy(&text);
        Some(text.trim_end_matches(['\0', ' ']).to_owned())
    }

    async fn follows(&self, home: &Home, text: &str) {
        eventually(text, async || (self.text(home)? == text).then_some(())).await;
    }

    /// Enters the volume in the journal of the other site, as ceph-csi's controller does.
    fn enter(&self) {
        let uuid = &self.volume.handle[self.volume.handle.len() - 36..];
        let (from, to) = (self.here.io(), self.there.io());
        let entry = format!("csi.volume.{uuid}");
        for object in [&*entry, "csi.volumes.default"] {
            let keys = from.omap_list(object, "").unwrap();
            let keys: Vec<_> = keys.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            to.omap_set(object, &keys).unwrap();
        }
        let id = self.id(&self.there).expect("a copy");
        to.omap_set(&entry, &[("csi.imageid", &*id)]).unwrap();
    }

    /// Once the daemons run, a resync replaces the other site's image by this one's.
    async fn is_copied_anew(&mut self, text: &str) {
        let before = self.id(&self.there).unwrap();
        self.start_daemons();
        let resync = ReplicationChange::Resync { force: true };
        eventually("copied anew", async || {
            match self.there.replicate(&self.volume, resync.clone()).await {
                Ok(Replicated::NotYet) => {}
                Ok(Replicated::Done) => panic!("the other is primary"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error}"),
            }
            let id = self.id(&self.there)?;
            (id != before && self.entered_id(&self.there) == id).then_some(())
        })
        .await;
        self.follows(&self.there, text).await;
        assert_eq!(self.role(&self.there), Mirroring::Secondary);
    }

    fn entered_id(&self, home: &Home) -> String {
        let uuid = &self.volume.handle[self.volume.handle.len() - 36..];
        let keys = home.io().omap_list(&format!("csi.volume.{uuid}"), "");
        keys.unwrap()["csi.imageid"].clone()
    }
}

#[tokio::test]
#[ignore = "two clusters for two minutes: make test-matrix"]
async fn a_volume_fails_over_and_comes_back() {
    let Some(mut sites) = Sites::new().await else {
        return;
    };
    let volume = sites.volume.clone();
    sites.here.replicate(&volume, enable()).await.unwrap();
    sites.write(&sites.here, "first");
    sites.follows(&sites.there, "first").await;
    sites.enter();
    let info = eventually("a report", async || {
        let (handle, secrets) = (volume.handle.clone(), sites.here.secrets());
        sites.here.rbd.replication_info(handle, secrets).await.ok()
    })
    .await;
    assert!(info.synced.is_some(), "{info:?}");

    // Planned: the one is demoted, the other promoted.
    let demoted = sites.here.replicate(&volume, ReplicationChange::Demote);
    demoted.await.unwrap();
    eventually("promoted", async || {
        let promoted = sites.there.replicate(&volume, promote(false)).await;
        promoted.ok()
    })
    .await;
    assert_eq!(sites.role(&sites.there), Mirroring::Primary);
    sites.write(&sites.there, "second");
    sites.follows(&sites.here, "second").await;
    assert_eq!(sites.role(&sites.here), Mirroring::Secondary);

    // The other site is lost.
    sites.daemons.clear();
    let refused = sites.here.replicate(&volume, promote(false)).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Precondition);
    sites.here.replicate(&volume, promote(true)).await.unwrap();
    sites.write(&sites.here, "third");
    // It returns.
    let demoted = sites.there.replicate(&volume, ReplicationChange::Demote);
    demoted.await.unwrap();
    sites.is_copied_anew("third").await;

    // Both are primary for a while, and an administrator demotes the one.
    sites.daemons.clear();
    sites.there.replicate(&volume, promote(true)).await.unwrap();
    sites.write(&sites.there, "lost");
    sites.write(&sites.here, "fourth");
    let path = format!("{}/{}", sites.there.pool, sites.image());
    let demote = ["mirror", "image", "demote", &path];
    sites.there.cluster.rbd(&demote);
    sites.is_copied_anew("fourth").await;
}
