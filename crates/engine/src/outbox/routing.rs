//! Which way a row takes: the first route that matches its topic (contract 7.1), for a child the first that matches and names
//! its destination (contract 7.2).

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use crate::config::{DestinationConfig, Route};

/// Position of a destination in the engine's tables.
pub type DestinationIndex = usize;

/// Where a row goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// To one destination, by this route.
    One {
        /// Where to.
        destination: DestinationIndex,
        /// Whose transform and routing key apply.
        route: usize,
    },
    /// To be expanded into children.
    Many {
        /// Whose destinations.
        route: usize,
    },
    /// Nowhere.
    NoRoute,
}

/// The most topics whose route is remembered. Beyond it routes are looked up again, nothing else changes.
const TOPICS_MAX: usize = 4096;

/// The routes of a Relay, with a memory for topics that were met.
pub struct Routes {
    routes: Vec<Route>,
    destinations: Vec<Vec<DestinationIndex>>,
    indexes: HashMap<Arc<str>, DestinationIndex>,
    met: HashMap<Arc<str>, Target>,
}

impl Routes {
    /// `names` are the destinations in the order of their index.
    pub fn new(routes: Vec<Route>, configured: &BTreeMap<String, DestinationConfig>) -> Self {
        let indexes: HashMap<Arc<str>, DestinationIndex> =
            configured.keys().enumerate().map(|(index, name)| (Arc::from(name.as_str()), index)).collect();
        let destinations = routes
            .iter()
            .map(|route| route.destinations.iter().filter_map(|name| indexes.get(name.as_str()).copied()).collect())
            .collect();
        Self { routes, destinations, indexes, met: HashMap::new() }
    }

    /// The way of a row.
    pub fn target(&mut self, topic: &str, destination: Option<&str>) -> Target {
        match destination {
            Some(name) => self.child(topic, name),
            None => self.plain(topic),
        }
    }

    fn plain(&mut self, topic: &str) -> Target {
        if let Some(target) = self.met.get(topic) {
            return *target;
        }
        let target = self
            .routes
            .iter()
            .position(|route| route.topics.iter().any(|pattern| pattern.matches(topic)))
            .map_or(Target::NoRoute, |route| match self.destinations[route].as_slice() {
                [] => Target::NoRoute,
                [destination] => Target::One { destination: *destination, route },
                _ => Target::Many { route },
            });
        if self.met.len() < TOPICS_MAX {
            self.met.insert(Arc::from(topic), target);
        }
        target
    }

    fn child(&self, topic: &str, name: &str) -> Target {
        let Some(destination) = self.indexes.get(name).copied() else {
            return Target::NoRoute;
        };
        self.routes
            .iter()
            .enumerate()
            .position(|(index, route)| {
                self.destinations[index].contains(&destination)
                    && route.topics.iter().any(|pattern| pattern.matches(topic))
            })
            .map_or(Target::NoRoute, |route| Target::One { destination, route })
    }

    /// The route at `index`.
    pub fn route(&self, index: usize) -> &Route {
        &self.routes[index]
    }

    /// Topics met so far that lead to `destination` alone, at most `limit`.
    pub fn topics_of(&self, destination: DestinationIndex, limit: usize) -> Vec<String> {
        self.met
            .iter()
            .filter(|(_, target)| matches!(target, Target::One { destination: at, .. } if *at == destination))
            .take(limit)
            .map(|(topic, _)| topic.to_string())
            .collect()
    }
}
