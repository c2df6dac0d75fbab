//! Whether the monitors of the configured clusters answer.

use std::time::{Duration, Instant};

use super::{
    client::monitor,
    csi_format::config::{ClusterConfig, Clusters},
};
use crate::{error_chain, finding::Finding, kernel::net_namespace::within};

/// The monitors' time to answer.
const WITHIN: Duration = Duration::from_secs(3);

/// Asks the monitors of all clusters at once, which needs neither a user nor Ceph's
/// libraries. Blocks for seconds at most, if the list of clusters can be read.
pub fn inspect(clusters: &Clusters) -> Vec<Finding> {
    let all = match clusters.all() {
        Ok(all) => all,
        Err(error) => {
            let remedy = "correct the file of --ceph-config; it is read again after a change";
            return vec![Finding::faulty(
                "Ceph clusters",
                error_chain(&error),
                remedy,
            )];
        }
    };
    let deadline = Instant::now() + WITHIN;
    let asked: Vec<_> = all.iter().map(|cluster| ask(cluster, deadline)).collect();
    let answered = asked.into_iter().zip(all.iter()).map(|(asked, cluster)| {
        let subject = format!("cluster {}", cluster.cluster_id);
        let answer = asked.and_then(|pending| pending.answer().map_err(|it| it.to_string()));
        match answer {
            Ok(monitor) => Finding::usable(subject, format!("monitor {monitor} answers")),
            Err(why) => Finding::faulty(
                subject,
                why,
                "start the monitors, correct their addresses in --ceph-config, or open ports 3300 and 6789 to this node",
            ),
        }
    });
    answered.collect()
}

fn ask(cluster: &ClusterConfig, deadline: Instant) -> Result<monitor::PendingGreeting, String> {
    let namespace = cluster.net_namespace_file.as_deref();
    let asked = within(namespace, || monitor::ask(&cluster.monitors, deadline));
    let asked = asked.map_err(|error| {
        let file = namespace.unwrap_or_else(|| "".as_ref()).display();
        format!("cannot enter the network namespace {file}: {error}")
    })?;
    asked.map_err(|error| error.to_string())
}
