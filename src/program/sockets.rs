//! The sockets of a plugin: CSI's, and that of csi-addons if there is to be one. One process
//! owns both.

use std::time::Duration;

use futures_util::FutureExt as _;
use tonic::service::Routes;

use crate::endpoint::{Endpoint, Listener, ServeError};

/// The sockets to serve on.
#[derive(Debug)]
pub struct Sockets {
    csi: Endpoint,
    addons: Option<Endpoint>,
}

impl Sockets {
    /// The two must differ: the second to be made would replace the first.
    pub fn new(csi: Endpoint, addons: Option<Endpoint>) -> Result<Self, String> {
        if addons.as_ref() == Some(&csi) {
            return Err(format!(
                "--csi-addons-endpoint: {csi} is the socket of --endpoint; choose another"
            ));
        }
        Ok(Self { csi, addons })
    }

    fn all(&self) -> impl Iterator<Item = &Endpoint> {
        std::iter::once(&self.csi).chain(&self.addons)
    }

    /// Fails while a live process serves on one of them.
    pub async fn refuse_live(&self) -> Result<(), ServeError> {
        for endpoint in self.all() {
            endpoint.refuse_live().await?;
        }
        Ok(())
    }

    /// Replaces them by sockets of this process. The caller has found that no live process
    /// serves.
    pub fn take(&self) -> Result<Listeners, ServeError> {
        Ok(Listeners {
            csi: self.csi.take()?,
            addons: self.addons.as_ref().map(Endpoint::take).transpose()?,
        })
    }
}

/// The sockets of this process.
#[derive(Debug)]
pub struct Listeners {
    csi: Listener,
    addons: Option<Listener>,
}

impl Listeners {
    /// Serves CSI's `routes`, and those of csi-addons, until `stop` resolves; then calls in
    /// progress get `grace` to finish.
    pub async fn serve(
        self,
        routes: Routes,
        addons: Routes,
        stop: impl Future<Output = ()>,
        grace: Duration,
    ) -> Result<(), ServeError> {
        let stop = stop.shared();
        let csi = self.csi.serve(routes, stop.clone(), grace);
        let Some(listener) = self.addons else {
            return csi.await;
        };
        tokio::try_join!(csi, listener.serve(addons, stop, grace)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_service_has_a_socket_of_its_own() {
        let endpoint = |text: &str| text.parse::<Endpoint>().unwrap();
        let both = |addons: &str| Sockets::new(endpoint("/run/a.sock"), Some(endpoint(addons)));
        both("/run/b.sock").unwrap();
        let error = both("unix:///run/a.sock").unwrap_err();
        assert!(error.contains("--csi-addons-endpoint"), "{error}");
    }
}
