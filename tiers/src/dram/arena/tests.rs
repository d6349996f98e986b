//! Ownership: slots come home once, extents are carved anew only when nothing is out.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::*;

#[derive(Debug, Default)]
struct Shelf(Mutex<Vec<FreeSlot>>);

impl Home for Shelf {
    fn release(&self, slot: FreeSlot) {
        self.0.lock().push(slot);
    }
}

fn carved(slot_bytes: usize) -> (Arc<Shelf>, Vec<FreeSlot>) {
    let shelf = Arc::new(Shelf::default());
    let home: Weak<Shelf> = Arc::downgrade(&shelf);
    let extent = map_extents(1, 1 << 20, 1 << 20).unwrap().pop().unwrap();
    (shelf, extent.carve(slot_bytes, home))
}

fn filled(slot: FreeSlot, lengths: &[u32]) -> Payload {
    let mut writers = slot.take(lengths).unwrap();
    for (value, writer) in (1_u8..).zip(&mut writers) {
        writer.bytes_mut().fill(value);
    }
    seal(writers, lengths.iter().sum()).unwrap()
}

#[test]
fn parts_are_sealed_into_one_block() {
    let (shelf, mut slots) = carved(4096);
    assert_eq!(slots.len(), 256);
    let payload = filled(slots.pop().unwrap(), &[10, 20]);
    assert_eq!(payload.as_ref(), [[1; 10].as_slice(), &[2; 20]].concat());
    let pin = payload.clone();
    assert!(pin.is_shared() && pin.is_same(&payload));
    drop(payload);
    assert!(!pin.is_shared() && shelf.0.lock().is_empty());
    drop(pin);
    assert_eq!(shelf.0.lock().len(), 1);
}

#[test]
fn blocks_do_not_touch_one_another() {
    let (_shelf, slots) = carved(1000);
    let values = || (0..=255_u8).cycle();
    let payloads: Vec<_> = slots
        .into_iter()
        .zip(values())
        .map(|(slot, value)| {
            let mut writers = slot.take(&[1000]).unwrap();
            writers[0].bytes_mut().fill(value);
            seal(writers, 1000).unwrap()
        })
        .collect();
    assert_eq!(payloads.len(), 1048);
    for (payload, value) in payloads.iter().zip(values()) {
        assert!(payload.as_ref().iter().all(|byte| *byte == value));
    }
}

#[test]
fn an_abandoned_writer_gives_the_slot_back_once() {
    let (shelf, mut slots) = carved(4096);
    let mut writers = slots.pop().unwrap().take(&[1, 1, 1]).unwrap();
    drop(writers.pop());
    assert!(shelf.0.lock().is_empty());
    // A part is gone for good: the others can no longer be sealed as the whole.
    let writers = seal(writers, 3).unwrap_err();
    drop(writers);
    assert_eq!(shelf.0.lock().len(), 1);
}

#[test]
fn only_the_parts_of_one_slot_in_order_are_sealed() {
    let (_shelf, mut slots) = carved(4096);
    let mut a = slots.pop().unwrap().take(&[1, 2]).unwrap();
    let mut b = slots.pop().unwrap().take(&[1, 2]).unwrap();
    a.swap(0, 1);
    let mut a = seal(a, 3).unwrap_err();
    a.swap(0, 1);
    std::mem::swap(&mut a[1], &mut b[1]);
    let mut a = seal(a, 3).unwrap_err();
    std::mem::swap(&mut a[1], &mut b[1]);
    assert!(seal(a, 3).is_ok() && seal(b, 3).is_ok() && seal(Vec::new(), 0).is_err());
}

#[test]
fn what_does_not_fit_leaves_the_slot_free() {
    let (_shelf, mut slots) = carved(4096);
    let slot = slots.pop().unwrap().take(&[4097]).unwrap_err();
    let slot = slot.take(&[u32::MAX, u32::MAX]).unwrap_err();
    let slot = slot.take(&[]).unwrap_err();
    assert_eq!(filled(slot, &[4096]).as_ref().len(), 4096);
}

#[test]
fn an_extent_is_rejoined_only_when_all_slots_are_home() {
    let (shelf, mut slots) = carved(1 << 18);
    let payload = filled(slots.pop().unwrap(), &[5]);
    let slots = rejoin(slots).unwrap_err();
    assert_eq!(slots.len(), 3);
    drop(payload);
    let slots: Vec<_> = slots.into_iter().chain(shelf.0.lock().drain(..)).collect();
    let view = slots.first().unwrap().view();
    let extent = rejoin(slots).unwrap();
    assert!(view.owners().is_empty());
    assert!(format!("{extent:?}").contains("generation 1"));
    let home: Weak<Shelf> = Arc::downgrade(&shelf);
    let again = extent.carve(1 << 19, home);
    assert_eq!((again.len(), again[0].bytes()), (2, 1 << 19));
}

#[test]
fn slots_of_two_extents_are_not_rejoined() {
    let (_shelf, mut a) = carved(1 << 19);
    let (_other, mut b) = carved(1 << 19);
    std::mem::swap(&mut a[0], &mut b[0]);
    assert!(rejoin(a).is_err());
}

#[test]
fn owners_and_ages_are_seen_through_a_view() {
    let (_shelf, mut slots) = carved(4096);
    let view = slots[0].view();
    let payload = filled(slots.pop().unwrap(), &[5]);
    payload.set_owner(0);
    payload.change_age(0, 7);
    payload.change_age(7, 3);
    assert_eq!((view.owners(), view.ages()), (vec![0], 3));
    drop(payload);
    assert!(view.owners().is_empty());
}

#[test]
fn the_arena_outlives_its_pool_while_somebody_reads() {
    let (shelf, mut slots) = carved(4096);
    let payload = filled(slots.pop().unwrap(), &[100]);
    drop(slots);
    drop(shelf);
    assert!(payload.as_ref().iter().all(|byte| *byte == 1));
}

#[test]
fn touching_beforehand_keeps_the_order() {
    let mut extents = map_extents(3, 1 << 20, 2 << 20).unwrap();
    for extent in &mut extents {
        extent.pre_touch();
    }
    assert_eq!(extents.iter().map(Extent::index).collect::<Vec<_>>(), [0, 1, 2]);
}
