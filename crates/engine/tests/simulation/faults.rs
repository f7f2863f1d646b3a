//! What goes wrong in a world, and the bugs that a world can be built with to show that the oracle finds them.

/// A classic bug, reintroduced on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sabotage {
    #[default]
    None,
    /// Only a position is remembered: what commits late is never read.
    NoLap,
    /// A settle does not repeat what it read, so it marks a row that was replayed meanwhile.
    SettleIgnoresReplay,
    /// The destination says done before the receiver has it.
    MarkBeforeSend,
    /// A settle does not ask whether its worker still has its lease.
    UnfencedSettle,
    /// The lease of a marked row is not renewed with that of its worker.
    RowLeaseNotRenewed,
    /// Every read begins at the oldest row, so that rows that may not go fill it.
    HeldHidesFree,
    /// A takeover judges the lease of the last owner by what it read before that one renewed it, and does not lock it.
    TakeoverReadsEarly,
    /// Without lanes: any row may be read and claimed, not only the first unfinished one of its key.
    ClaimWithoutHeadRule,
    /// Without lanes: the claim does not repeat the head rule of the read, so it misses an earlier row that was replayed meanwhile.
    HeadRuleOnlyRead,
}

/// How much goes wrong.
#[derive(Debug, Clone, Copy)]
pub struct Weather {
    /// Chance that a call of a port fails before it did anything.
    pub lost_request: f64,
    /// Chance that the answer of a call is lost after it did everything.
    pub lost_reply: f64,
    /// Chance that a call is carried out twice, and the second answer comes back.
    pub doubled: f64,
    /// Chance that a publish fails before it arrives.
    pub publish_fails: f64,
    /// Chance that a publish arrives and its answer is lost.
    pub answer_lost: f64,
    /// Chance that a publish hangs until its time-out.
    pub publish_hangs: f64,
    /// Kills of workers over the whole run.
    pub kills: u32,
    /// Clean stops and starts over the whole run.
    pub stops: u32,
    /// Jumps of the database's clock over the whole run.
    pub clock_jumps: u32,
    /// Times a destination cannot be reached.
    pub outages: u32,
    /// Replays of finished rows.
    pub replays: u32,
    /// Pending rows whose time is moved, or that are deleted, by hand.
    pub edits: u32,
    /// Messages that kill their worker whenever they are published.
    pub killers: u32,
    /// Rows of a hundred whose writes a trigger refuses until the end, alone or in a batch.
    pub refused: u8,
    /// `south` is away until the end; the others must not wait for it.
    pub held: bool,
}

impl Weather {
    pub const CALM: Self = Self {
        lost_request: 0.0,
        lost_reply: 0.0,
        doubled: 0.0,
        publish_fails: 0.0,
        answer_lost: 0.0,
        publish_hangs: 0.0,
        kills: 0,
        stops: 0,
        clock_jumps: 0,
        outages: 0,
        replays: 0,
        edits: 0,
        killers: 0,
        refused: 0,
        held: false,
    };

    /// Does no lease end while its owner works? Then one message of a key is in flight at a time, whoever sends it.
    pub fn keeps_leases(&self) -> bool {
        self.kills == 0 && self.killers == 0 && self.clock_jumps == 0 && self.publish_hangs == 0.0
    }

    /// Can a message arrive twice in this weather?
    pub fn allows_duplicates(&self) -> bool {
        self.answer_lost > 0.0
            || self.publish_hangs > 0.0
            || self.kills > 0
            || self.killers > 0
            || self.clock_jumps > 0
            || self.replays > 0
            || self.edits > 0
            || self.lost_request > 0.0
            || self.lost_reply > 0.0
            || self.doubled > 0.0
            || self.stops > 0
            || self.refused > 0
    }
}
