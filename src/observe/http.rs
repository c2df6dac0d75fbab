//! The HTTP listener: `/metrics`, `/healthz`, `/readyz`.
//!
//! A killed agent whose thread hangs in the kernel stays as a zombie and keeps
//! its port for as long as the device hangs. Its successor must serve volumes
//! all the same, so a taken port is tried again in the background and is never
//! fatal.
//!
//! Volumes are served by the same thread and with the same descriptors, and whoever
//! reaches the port may connect. So a connection is for one request, lives for some
//! seconds, whatever its client does, and where there are too many the oldest is
//! closed for a new one: clients that connect and say nothing keep nobody out.

use std::{collections::VecDeque, net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{
    Readiness,
    metrics::{self, Metrics},
};

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
        let error = accept(&listener, &app).await;
        tracing::warn!(%addr, %error, "the metrics listener stopped; starting it again");
        sleep(retry).await;
    }
}

/// Serves connections until the listener breaks.
async fn accept(listener: &TcpListener, app: &Router) -> std::io::Error {
    let mut connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connections.serve(stream, app.clone()),
            // It went before it was taken.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(error) => return error,
        }
    }
}

/// The connections that are being served, the oldest first.
#[derive(Default)]
struct Connections(VecDeque<JoinHandle<()>>);

impl Connections {
    /// Serves one more, in place of the oldest where there are too many.
    fn serve(&mut self, stream: TcpStream, app: Router) {
        self.0.retain(|connection| !connection.is_finished());
        if self.0.len() >= MOST
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
            metrics::http_dropped("crowded");
        }
        self.0.push_back(tokio::spawn(async move {
            let service = TowerToHyperService::new(app);
            let connection = http1::Builder::new()
                .keep_alive(false)
                .max_buf_size(HEADERS)
                .serve_connection(TokioIo::new(stream), service);
            // What went wrong is the client's to see.
            if timeout(LIFETIME, connection).await.is_err() {
                metrics::http_dropped("slow");
            }
        }));
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
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

/// Connections at once.
const MOST: usize = 64;
/// From a connection's beginning to its end.
const LIFETIME: Duration = Duration::from_secs(10);
/// Bytes of a request's head at most.
const HEADERS: usize = 16 << 10;
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
    fn clients_that_say_nothing_are_closed_for_new_ones() {
        run(async {
            let addr = free_address().await;
            let server = tokio::spawn(serve(addr, Readiness::default(), installed()));
            assert!(fetch(addr, "/healthz").await.starts_with("HTTP/1.1 200"));
            let mut silent = Vec::new();
            for _ in 0..3 * MOST {
                silent.push(TcpStream::connect(addr).await.unwrap());
                assert!(fetch(addr, "/healthz").await.starts_with("HTTP/1.1 200"));
            }
            // The first has been closed, unasked.
            let mut said = String::new();
            silent[0].read_to_string(&mut said).await.unwrap();
            assert_eq!(said, "");
            let metrics = fetch(addr, "/metrics").await;
            let dropped = "uring_csi_http_dropped_total{reason=\"crowded\"}";
            assert!(metrics.contains(dropped), "{metrics}");
            server.abort();
        });
    }

    #[test]
    fn heads_without_end_are_not_read_to_their_end() {
        run(async {
            let addr = free_address().await;
            let server = tokio::spawn(serve(addr, Readiness::default(), installed()));
            assert!(fetch(addr, "/healthz").await.starts_with("HTTP/1.1 200"));
            let mut stream = TcpStream::connect(addr).await.unwrap();
            let head = format!("GET /healthz HTTP/1.1\r\nX: {}", "x".repeat(4 * HEADERS));
            // It may be closed before all of it is written.
            let _ = stream.write_all(head.as_bytes()).await;
            let mut said = Vec::new();
            let _ = stream.read_to_end(&mut said).await;
            let said = String::from_utf8_lossy(&said);
            assert!(!said.contains("200 OK"), "{said}");
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
