//! The HTTP listener: `/metrics`, `/healthz`, `/readyz`.
//!
//! A killed agent whose thread hangs in the kernel stays as a zombie and keeps
//! its port for as long as the device hangs. Its successor must serve volumes
//! nevertheless, so the bind of a port in use is retried in the background and is never
//! fatal.
//!
//! Volumes are served by the same thread and with the same descriptors, and any client
//! in reach of the port may connect. So a connection serves one request and ends after
//! some seconds, and above a limit a new one closes the oldest: idle clients keep no
//! other client out.

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

/// Serves until the future is dropped.
///
/// - `/metrics`: every series, in Prometheus' text format.
/// - `/healthz`: 200; the runtime thread answers.
/// - `/readyz`: 200, or 503 and the reason.
///
/// Must run within a tokio runtime (of one thread, too).
pub async fn serve(addr: SocketAddr, readiness: Readiness, metrics: Metrics) {
    let of_agent = readiness.clone();
    metrics.before_scrape(move || metrics::ready(of_agent.reason().is_none()));
    let app = Router::new()
        .route("/metrics", get(scrape).with_state(metrics.clone()))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz).with_state(readiness));
    tokio::join!(listen(addr, RETRY, app), run_upkeep(&metrics));
}

async fn listen(addr: SocketAddr, retry: Duration, app: Router) {
    loop {
        let listener = bind_when_free(addr, retry).await;
        let error = accept(&listener, &app).await;
        tracing::warn!(%addr, %error, "the metrics listener failed; restarting it");
        sleep(retry).await;
    }
}

/// Serves connections until accept(2) fails.
async fn accept(listener: &TcpListener, app: &Router) -> std::io::Error {
    let mut connections = HttpConnections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connections.serve(stream, app.clone()),
            // The client closed it before it was accepted.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(error) => return error,
        }
    }
}

/// The open connections, oldest first.
#[derive(Default)]
struct HttpConnections(VecDeque<JoinHandle<()>>);

impl HttpConnections {
    /// Serves another one; above the limit it closes the oldest.
    fn serve(&mut self, stream: TcpStream, app: Router) {
        self.0.retain(|connection| !connection.is_finished());
        if self.0.len() >= MAX_CONNECTIONS
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
            metrics::http_dropped("crowded");
        }
        self.0.push_back(tokio::spawn(async move {
            let service = TowerToHyperService::new(app);
            let connection = http1::Builder::new()
                .keep_alive(false)
                .max_buf_size(MAX_HEADER_BYTES)
                .serve_connection(TokioIo::new(stream), service);
            // The client sees any other error.
            if timeout(LIFETIME, connection).await.is_err() {
                metrics::http_dropped("slow");
            }
        }));
    }
}

impl Drop for HttpConnections {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

async fn bind_when_free(addr: SocketAddr, retry: Duration) -> TcpListener {
    let mut warned = false;
    loop {
        match TcpListener::bind(addr).await {
            Ok(listener) => {
                tracing::info!(%addr, "serving metrics");
                return listener;
            }
            Err(error) => {
                if !warned {
                    tracing::warn!(
                        %addr, %error,
                        "cannot serve metrics yet; retrying every {retry:?}"
                    );
                    warned = true;
                }
                sleep(retry).await;
            }
        }
    }
}

async fn run_upkeep(metrics: &Metrics) {
    loop {
        sleep(UPKEEP).await;
        metrics.upkeep();
    }
}

async fn scrape(State(metrics): State<Metrics>) -> impl IntoResponse {
    (
        [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
        metrics.render(),
    )
}

async fn readyz(State(readiness): State<Readiness>) -> (StatusCode, String) {
    match readiness.reason() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

/// Open connections.
const MAX_CONNECTIONS: usize = 64;
/// From accept to close of a connection.
const LIFETIME: Duration = Duration::from_secs(10);
/// Bytes of a request's headers.
const MAX_HEADER_BYTES: usize = 16 << 10;
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
    fn readyz_states_the_reason() {
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
            assert!(metrics.contains("uring_csi_ready 0\n"), "{metrics}");
            readiness.set(None);
            let metrics = fetch(addr, "/metrics").await;
            assert!(metrics.contains("uring_csi_ready 1\n"), "{metrics}");
            server.abort();
        });
    }

    #[test]
    fn new_clients_replace_idle_ones() {
        run(async {
            let addr = free_address().await;
            let server = tokio::spawn(serve(addr, Readiness::default(), installed()));
            assert!(fetch(addr, "/healthz").await.starts_with("HTTP/1.1 200"));
            let mut silent = Vec::new();
            for _ in 0..3 * MAX_CONNECTIONS {
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
            let head = format!(
                "GET /healthz HTTP/1.1\r\nX: {}",
                "x".repeat(4 * MAX_HEADER_BYTES)
            );
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
