//! How many calls may be at work or waiting at one time, and how many streams open.
//!
//! There are two rooms for calls, so that no flood of those who want a lock refuses
//! those who have one: Acquire and Get are in the one, Renew and Release in the other.
//! KeepAlive streams have a third.
//!
//! In each, a connection has no more than there is room left. One alone takes
//! half of it; of several that flood each takes as much as stays free, so there is room
//! for whoever comes next.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The other end of the connection that a call or a stream came on; none for calls of our own.
pub(crate) type Peer = Option<SocketAddr>;

pub(crate) struct Room {
    size: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    /// By those who have any.
    by: HashMap<SocketAddr, usize>,
}

/// Why a call was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    Full,
    /// Its connection has its share.
    Share,
}

/// One's place, given back on drop.
pub(crate) struct Place {
    room: Arc<Room>,
    peer: Peer,
}

impl Room {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        let taken = Mutex::default();
        Arc::new(Self { size, taken })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many are in it.
    pub(crate) fn taken(&self) -> usize {
        self.lock().all
    }

    pub(crate) fn enter(self: &Arc<Self>, peer: Peer) -> Result<Place, NoRoom> {
        let mut taken = self.lock();
        let free = self.size - taken.all;
        if free == 0 {
            return Err(NoRoom::Full);
        }
        if let Some(peer) = peer {
            let own = taken.by.entry(peer).or_default();
            // Whoever has none has less than what is free.
            if *own >= free {
                return Err(NoRoom::Share);
            }
            *own += 1;
        }
        taken.all += 1;
        drop(taken);
        let room = Arc::clone(self);
        Ok(Place { room, peer })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.room.lock();
        taken.all -= 1;
        if let Some(peer) = self.peer
            && let Some(own) = taken.by.get_mut(&peer)
        {
            *own -= 1;
            if *own == 0 {
                taken.by.remove(&peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{NoRoom, Peer, Place, Room};

    fn peer(port: u16) -> Peer {
        Some(([127, 0, 0, 1], port).into())
    }

    /// As many calls as a connection may have now, and why no more.
    fn flood(room: &std::sync::Arc<Room>, port: u16) -> (Vec<Place>, NoRoom) {
        let mut places = Vec::new();
        loop {
            match room.enter(peer(port)) {
                Ok(place) => places.push(place),
                Err(why) => return (places, why),
            }
        }
    }

    #[test]
    fn a_connection_has_no_more_than_is_left() {
        let room = Room::new(100);
        let (first, why) = flood(&room, 1);
        assert_eq!((first.len(), why), (50, NoRoom::Share));
        let (second, why) = flood(&room, 2);
        assert_eq!((second.len(), why), (25, NoRoom::Share));
        // The first has more than its share by now; others come in.
        assert_eq!(room.enter(peer(1)).err(), Some(NoRoom::Share));
        let third = room.enter(peer(3)).ok();
        assert!(third.is_some());
        assert_eq!(room.taken(), 76);
        // Our own calls have no share.
        let ours: Vec<_> = std::iter::from_fn(|| room.enter(None).ok()).collect();
        assert_eq!(ours.len(), 24);
        assert_eq!(room.enter(peer(4)).err(), Some(NoRoom::Full));
        drop((first, second, third, ours));
        assert_eq!(room.taken(), 0);
        assert!(room.lock().by.is_empty());
    }

    #[test]
    fn the_smallest_room_has_one_place() {
        let room = Room::new(1);
        let place = room.enter(peer(1)).ok();
        assert!(place.is_some());
        assert_eq!(room.enter(peer(2)).err(), Some(NoRoom::Full));
        drop(place);
        assert!(room.enter(peer(2)).is_ok());
    }
}
