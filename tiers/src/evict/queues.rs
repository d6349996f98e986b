//! Doubly linked queues of ids, threaded through one array.
//!
//! Each id is in at most one queue. A queue is a ring through a sentinel node, so linking has no
//! special case for an empty queue; the sentinels are the first nodes and an id's node is
//! `id + queues`. The array grows to the largest id seen and is never shrunk: ids are dense.

use super::EntryId;

/// What is known about an id, and its neighbours. 24 bytes.
#[derive(Debug, Clone, Copy)]
struct Node {
    /// The block's name across evictions.
    tag: u64,
    /// The neighbour nearer to the cold end; for a sentinel, the front (warmest) node.
    colder: u32,
    /// The neighbour nearer to the front; for a sentinel, the back (coldest) node.
    warmer: u32,
    /// Which queue the node is in, or [`NOWHERE`].
    queue: u8,
    /// Uses counted by the policy.
    uses: u8,
}

const NOWHERE: u8 = u8::MAX;

const _: () = assert!(size_of::<Node>() == 24, "the cost for each id is documented");

/// Several queues of ids.
#[derive(Debug)]
pub(super) struct Queues<const QUEUES: usize> {
    nodes: Vec<Node>,
    lens: [usize; QUEUES],
}

impl<const QUEUES: usize> Queues<QUEUES> {
    pub(super) fn new() -> Self {
        let ring = |at| Node { tag: 0, colder: at, warmer: at, queue: NOWHERE, uses: 0 };
        Self { nodes: (0_u32..).take(QUEUES).map(ring).collect(), lens: [0; QUEUES] }
    }

    /// How many ids are in `queue`.
    pub(super) fn len(&self, queue: u8) -> usize {
        self.lens.get(usize::from(queue)).copied().unwrap_or(0)
    }

    /// The queue that holds `id`.
    pub(super) fn queue_of(&self, id: EntryId) -> Option<u8> {
        self.node(id).map(|node| node.queue).filter(|queue| *queue != NOWHERE)
    }

    pub(super) fn tag(&self, id: EntryId) -> u64 {
        self.node(id).map_or(0, |node| node.tag)
    }

    pub(super) fn uses(&self, id: EntryId) -> u8 {
        self.node(id).map_or(0, |node| node.uses)
    }

    pub(super) fn set_uses(&mut self, id: EntryId, uses: u8) {
        if let Some(node) = self.nodes.get_mut(at(id, QUEUES)) {
            node.uses = uses;
        }
    }

    /// Makes a new `id` the warmest of `queue`, with no uses.
    pub(super) fn insert(&mut self, queue: u8, id: EntryId, tag: u64) {
        let at = at(id, QUEUES);
        if at >= self.nodes.len() {
            let absent = Node { tag: 0, colder: 0, warmer: 0, queue: NOWHERE, uses: 0 };
            self.nodes.resize(at.saturating_add(1), absent);
        }
        self.unlink(id);
        if let Some(node) = self.nodes.get_mut(at) {
            node.tag = tag;
            node.uses = 0;
        }
        self.link_front(queue, id);
    }

    /// Moves a resident `id` to the front of `queue`.
    pub(super) fn move_to_front(&mut self, queue: u8, id: EntryId) {
        if self.unlink(id) {
            self.link_front(queue, id);
        }
    }

    /// Takes `id` out of its queue; false if it is in none.
    pub(super) fn unlink(&mut self, id: EntryId) -> bool {
        let Some(node) = self.nodes.get_mut(at(id, QUEUES)) else {
            return false;
        };
        if node.queue == NOWHERE {
            return false;
        }
        let (queue, colder, warmer) = (node.queue, node.colder, node.warmer);
        node.queue = NOWHERE;
        self.join(colder, warmer);
        if let Some(len) = self.lens.get_mut(usize::from(queue)) {
            *len = len.saturating_sub(1);
        }
        true
    }

    /// The coldest id of `queue`.
    pub(super) fn back(&self, queue: u8) -> Option<EntryId> {
        self.nodes.get(usize::from(queue)).and_then(|ring| id_of(ring.warmer, QUEUES))
    }

    /// The neighbour of `id` that is nearer to the front of its queue.
    pub(super) fn warmer(&self, id: EntryId) -> Option<EntryId> {
        self.node(id).and_then(|node| id_of(node.warmer, QUEUES))
    }

    /// The coldest id of `queue` that is evictable.
    pub(super) fn coldest(
        &self,
        queue: u8,
        evictable: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId> {
        let mut next = self.back(queue);
        while let Some(id) = next {
            if evictable(id) {
                return Some(id);
            }
            next = self.warmer(id);
        }
        None
    }

    fn node(&self, id: EntryId) -> Option<&Node> {
        self.nodes.get(at(id, QUEUES))
    }

    fn link_front(&mut self, queue: u8, id: EntryId) {
        let ring = u32::from(queue);
        let Some(front) = self.nodes.get(usize::from(queue)).map(|ring| ring.colder) else {
            return;
        };
        let at = at(id, QUEUES);
        let Ok(here) = u32::try_from(at) else { return };
        if let Some(node) = self.nodes.get_mut(at) {
            node.queue = queue;
        }
        self.join(front, here);
        self.join(here, ring);
        if let Some(len) = self.lens.get_mut(usize::from(queue)) {
            *len = len.saturating_add(1);
        }
    }

    /// Makes two nodes neighbours.
    fn join(&mut self, colder: u32, warmer: u32) {
        if let Some(node) = self.nodes.get_mut(colder as usize) {
            node.warmer = warmer;
        }
        if let Some(node) = self.nodes.get_mut(warmer as usize) {
            node.colder = colder;
        }
    }
}

/// The node of `id` where `queues` sentinels come first.
fn at(id: EntryId, queues: usize) -> usize {
    (id as usize).saturating_add(queues)
}

/// The id of a node, or `None` for a sentinel.
fn id_of(node: u32, queues: usize) -> Option<EntryId> {
    u32::try_from(queues).ok().and_then(|queues| node.checked_sub(queues))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cold_to_warm(queues: &Queues<2>, queue: u8) -> Vec<EntryId> {
        let mut seen = Vec::new();
        let none = queues.coldest(queue, &mut |id| {
            seen.push(id);
            false
        });
        assert_eq!(none, None);
        seen
    }

    #[test]
    fn ids_keep_the_order_of_insertion_and_move_between_queues() {
        let mut queues = Queues::<2>::new();
        for id in [5, 0, 9] {
            queues.insert(0, id, u64::from(id));
        }
        assert_eq!(cold_to_warm(&queues, 0), [5, 0, 9]);
        queues.move_to_front(0, 5);
        queues.move_to_front(1, 0);
        assert_eq!(cold_to_warm(&queues, 0), [9, 5]);
        assert_eq!(cold_to_warm(&queues, 1), [0]);
        assert_eq!((queues.len(0), queues.len(1)), (2, 1));
        assert_eq!(queues.queue_of(0), Some(1));
        assert!(queues.unlink(9) && !queues.unlink(9) && !queues.unlink(77));
        assert_eq!(queues.back(0), Some(5));
        assert_eq!(queues.queue_of(9), None);
    }
}
