//! How a key management system is asked over HTTP.

use std::time::Duration;

use ureq::{Agent, config::ConfigBuilder, typestate::AgentScope};

/// The longest a step of a request takes: to connect, to send, to wait for the answer. A
/// look-up of a name ends by the resolver's own timeouts, on the calling thread.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Statuses are the caller's to look at.
pub fn config() -> ConfigBuilder<AgentScope> {
    Agent::config_builder()
        .http_status_as_error(false)
        // A token or a passphrase goes to no other server.
        .max_redirects(0)
        .timeout_connect(Some(TIMEOUT))
        .timeout_send_request(Some(TIMEOUT))
        .timeout_send_body(Some(TIMEOUT))
        .timeout_recv_response(Some(TIMEOUT))
        .timeout_recv_body(Some(TIMEOUT))
}
