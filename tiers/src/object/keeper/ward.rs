//! What is different for the ordinal of a node that is gone: it is taken once, and let go.

use tokio::time::Instant;

use super::{Keep, Keeper, LOG_DEADLINE};
use crate::object::{
    Core,
    format::Role,
    owner::{Claim, OwnerError, open_epoch},
};

impl Keeper {
    /// Whose packs it keeps while their node is gone.
    pub(super) fn is_ward(&self) -> bool {
        self.seat.owner != self.core.config.owner
    }

    /// Takes the ordinal, unless another was faster.
    pub(super) async fn start_ward(&mut self, deadline: Instant) {
        let ordinal = self.seat.owner.ordinal;
        match self.take(deadline).await {
            Ok(taken) => {
                self.begin(taken).await;
                tracing::info!(ordinal, "object packs of a node that is gone adopted");
                self.core.metrics.adoptions.inc();
            }
            Err(why) => {
                tracing::info!(ordinal, %why, "object packs of a node that is gone not adopted");
                self.is_over = true;
            }
        }
    }

    /// A ward of which nothing is left needs no keeper, here or elsewhere.
    pub(super) async fn give_up_if_empty(&mut self) {
        let Core { config, bucket, .. } = self.core.as_ref();
        let (now, deadline) = (self.core.now_unix_ms(), Instant::now() + LOG_DEADLINE);
        let Some(log) = self.log.as_mut().filter(|log| log.is_empty()) else { return };
        let given_up = async {
            // What its node uploaded at last, and nobody names.
            if !log.sweep(now, deadline).await?.is_empty() {
                return Ok(false);
            }
            let claim = Claim::of(&config.holder, Role::Empty);
            open_epoch(bucket, &self.seat.owner, claim, now, deadline).await?;
            Ok::<_, OwnerError>(true)
        };
        match given_up.await {
            Ok(done) => self.is_over = done,
            Err(error) if self.ends(&error) => {}
            // If its node is back, the next sign of life finds out.
            Err(error) => tracing::info!(%error, "an empty ward is kept for now"),
        }
    }

    /// Another node has the ordinal now, or nobody.
    pub(super) fn let_go(&mut self) {
        self.core.seats.dismiss(self.seat.owner.ordinal);
        while let Ok(op) = self.queue.try_recv() {
            if let Keep::Removed { done, .. } = op {
                // Nothing of the ward can be found here any more. Whoever asked may have gone.
                drop(done.send(Ok(())));
            }
        }
        self.take_out(&self.packs().iter().map(|pack| pack.number).collect());
    }
}
