//! The HTTP listener: `/metrics`, `/healthz`, `/readyz`.
//!
//! A killed agent whose thread hangs in the kernel stays as a zombie and keeps
//! its port for as long as the device hangs. Its successor must serve volumes
//! all the same, so a taken port is tried again in the background and is never
//! fatal.

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use tokio::{net::TcpListener, time::sleep};

use super::{Readiness, metrics::Metrics};

/// Serves until dropped.
///
/// - `/metrics`: every series, in Prometheus' text format.
/// - `/healthz`: 200; the runtime thread answers.
/// - `/readyz`: 200, or 503 and the reason.
///
/// Must run within a tokio runtime (of one thread, too).
pub async fn serve(addr: SocketAddr, readiness: Readiness, metrics: Metrics) {
    let app = Router::new()
        .route("/metrics", get(render_metrics).with_state(metrics.clone()))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(tell_readiness).with_state(readiness));
    tokio::join!(listen(addr, RETRY, app), keep_up(&metrics));
}

async fn listen(addr: SocketAddr, retry: Duration, app: Router) {
    loop {
        let listener = bind_when_free(addr, retry).await;
        // axum takes accept errors in its stride; an end can only mean that the
        // listener broke, and then a new one is the cure.
        if let Err(error) = axum::serve(listener, app.clone()).await {
            tracing::warn!(%addr, %error, "the metrics listener stopped; starting it again");
        }
    }
}

async fn bind_when_free(addr: SocketAddr, retry: Duration) -> TcpListener {
    let mut told = false;
    loop {
        match TcpListener::bind(addr).await {
            Ok(listener) => {
                tracing::info!(%addr, "serving metrics");
                return listener;
            }
            Err(error) => {
                if !told {
                    tracing::warn!(
                        %addr, %error,
                        "can't serve metrics yet; trying again every {retry:?}, volumes are served meanwhile"
                    );
                    told = true;
                }
                sleep(retry).await;
            }
        }
    }
}

async fn keep_up(metrics: &Metrics) {
    loop {
        sleep(UPKEEP).await;
        metrics.upkeep();
    }
}

async fn render_metrics(State(metrics): State<Metrics>) -> impl IntoResponse {
    (
        [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
        metrics.render(),
    )
}

async fn tell_readiness(State(readiness): State<Readiness>) -> (StatusCode, String) {
    match readiness.reason() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

const RETRY: Duration = Duration::from_secs(5);
const UPKEEP: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;
    use crate::observe::metrics::tests::installed;

    fn run<F: Future>(test: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(test)
    }

    /// An address that was free a moment ago.
    async fn free_address() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    }

    async fn fetch(addr: SocketAddr, path: &str) -> String {
        let mut stream = loop {
            match TcpStream::connect(addr).await {
                Ok(stream) => break stream,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[test]
    fn readiness_is_told_with_its_reason() {
        run(async {
            let addr = free_address().await;
            let readiness = Readiness::default();
            readiness.set(Some("rebuilding the state of 3 volumes".to_owned()));
            let server = tokio::spawn(serve(addr, readiness.clone(), installed()));
            let answer = fetch(addr, "/readyz").await;
            assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
            assert!(answer.contains("3 volumes"), "{answer}");
            readiness.set(None);
            assert!(fetch(addr, "/readyz").await.starts_with("HTTP/1.1 200"));
            readiness.set(Some("mounts do not reach the pods".to_owned()));
            assert!(
                fetch(addr, "/readyz")
                    .await
                    .contains("do not reach the pods")
            );
            assert!(fetch(addr, "/healthz").await.starts_with("HTTP/1.1 200"));
            let metrics = fetch(addr, "/metrics").await;
            assert!(metrics.contains("uring_csi_build_info{"), "{metrics}");
            server.abort();
        });
    }

    #[test]
    fn a_taken_port_is_taken_over_once_free() {
        run(async {
            let holder = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = holder.local_addr().unwrap();
            let bound = tokio::spawn(bind_when_free(addr, Duration::from_millis(1)));
            tokio::task::yield_now().await;
            assert!(!bound.is_finished());
            drop(holder);
            assert_eq!(bound.await.unwrap().local_addr().unwrap(), addr);
        });
    }
}
