//! Group commit: everything that the sources of a worker want to store meets in one queue (docs/performance.md).
//!
//! While one insert is under way the next one gathers, so the cost of a commit is shared by all who wait, and a lone message
//! is never delayed.
//!
//! Invariants:
//! - A request is stored in one flush, in its own order; requests are stored in the order of their arrival.
//! - One message that the database does not take harms nobody else: a flush that fails at once is repeated row by row, and
//!   there the rows of an aggregate wait behind one of theirs that failed.
//! - One insert that hangs (it waits for somebody's open transaction) holds nobody else for long: the next flush then starts
//!   beside it, up to a few at a time.
//! - Bounded by bytes: beyond the bound whoever wants to store waits.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use queuebox_core::{
    Class, Fault,
    message::{Consumption, NewInboxRow},
    ports::{Admitted, Inbox},
};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::Instant,
};

/// Bounds of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Rows of one flush. A request has no more.
    pub flush_rows_max: usize,
    /// Bytes of one flush; a larger request is a flush of its own.
    pub flush_bytes_max: usize,
    /// Bytes that wait or are being stored, all requests together.
    pub queued_bytes_max: usize,
    /// Flushes at the same time.
    pub flushes_max: usize,
    /// After this time another flush may start beside the ones that are under way.
    pub slow_after: Duration,
}

impl Default for AdmissionLimits {
    fn default() -> Self {
        Self {
            flush_rows_max: 500,
            flush_bytes_max: 8 << 20,
            queued_bytes_max: 64 << 20,
            flushes_max: 3,
            slow_after: Duration::from_millis(100),
        }
    }
}

/// A flush that took longer than this to fail met a database in trouble, not a message in trouble.
const OUTAGE_AFTER: Duration = Duration::from_secs(1);

/// So many rows may fail alone in one flush before the rest is left for the next try.
const FAILURES_ALONE_MAX: usize = 10;

/// What became of one row that was to be stored. The row comes back in any case.
#[derive(Debug)]
pub struct Answered {
    /// The row as given.
    pub row: NewInboxRow,
    /// The database's answer.
    pub answer: Result<Admitted, Missed>,
}

/// Why a row is not known to be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missed {
    /// What the database said, to this row or to the flush that it was part of.
    pub fault: Fault,
    /// The row was tried alone, or waits behind one of its aggregate that was: it may be the row itself.
    pub is_suspect: bool,
}

struct Request {
    rows: Vec<NewInboxRow>,
    bytes: usize,
    reply: oneshot::Sender<Vec<Answered>>,
    _budget: OwnedSemaphorePermit,
}

/// The queue's entrance. Cheap to clone; the queue ends when the last clone is gone and everything is stored.
#[derive(Debug, Clone)]
pub struct Admissions {
    queue: mpsc::UnboundedSender<Request>,
    budget: Arc<Semaphore>,
    limits: AdmissionLimits,
}

impl Admissions {
    /// Starts the queue in front of `inbox`, on the current runtime. `stored` is notified when push rows were stored that are
    /// due at once.
    pub fn start(inbox: Arc<dyn Inbox>, limits: AdmissionLimits, stored: Arc<Notify>) -> Self {
        // Not bounded by count: the budget of bytes bounds it, and each row has a weight of its own.
        let (queue, requests) = mpsc::unbounded_channel();
        let budget = Arc::new(Semaphore::new(limits.queued_bytes_max.min(Semaphore::MAX_PERMITS)));
        tokio::spawn(Flusher { inbox, limits, stored }.run(requests));
        Self { queue, budget, limits }
    }

    /// The bounds.
    pub fn limits(&self) -> AdmissionLimits {
        self.limits
    }

    /// Stores `rows`, at most `flush_rows_max`, in one flush; one answer per row, in order. Dropping the future gives up
    /// waiting; the rows may be stored all the same.
    pub async fn admit(&self, rows: Vec<NewInboxRow>) -> Vec<Answered> {
        debug_assert!(rows.len() <= self.limits.flush_rows_max, "a request fits into a flush");
        let bytes = rows.iter().map(weight).sum::<usize>();
        let share = u32::try_from(bytes.min(self.limits.queued_bytes_max)).unwrap_or(u32::MAX);
        let Ok(budget) = Arc::clone(&self.budget).acquire_many_owned(share).await else { return stopped(rows) };
        let (reply, answers) = oneshot::channel();
        match self.queue.send(Request { rows, bytes, reply, _budget: budget }) {
            Ok(()) => answers.await.unwrap_or_default(),
            Err(mpsc::error::SendError(request)) => stopped(request.rows),
        }
    }
}

fn stopped(rows: Vec<NewInboxRow>) -> Vec<Answered> {
    missed(rows, &Fault::transient("stopping", "the worker is stopping"))
}

fn missed(rows: Vec<NewInboxRow>, fault: &Fault) -> Vec<Answered> {
    let missed = Missed { fault: fault.clone(), is_suspect: false };
    rows.into_iter().map(|row| Answered { row, answer: Err(missed.clone()) }).collect()
}

/// What a row takes of the budgets: its texts, and something for the rest.
pub(super) fn weight(row: &NewInboxRow) -> usize {
    row.payload.len() + row.headers.len() + row.idempotency_key.len() + 256
}

struct Flusher {
    inbox: Arc<dyn Inbox>,
    limits: AdmissionLimits,
    stored: Arc<Notify>,
}

impl Flusher {
    async fn run(self, mut requests: mpsc::UnboundedReceiver<Request>) {
        let mut waiting = VecDeque::new();
        let mut flushes = FuturesUnordered::new();
        let mut newest_began = Instant::now();
        let mut is_open = true;
        while is_open || !waiting.is_empty() || !flushes.is_empty() {
            while let Ok(request) = requests.try_recv() {
                waiting.push_back(request);
            }
            let next_may_begin = newest_began + self.limits.slow_after;
            let is_free =
                flushes.is_empty() || flushes.len() < self.limits.flushes_max && Instant::now() >= next_may_begin;
            if is_free && !waiting.is_empty() {
                newest_began = Instant::now();
                flushes.push(self.flush(self.gather(&mut waiting)));
                continue;
            }
            let may_begin_beside = !waiting.is_empty() && flushes.len() < self.limits.flushes_max;
            tokio::select! {
                request = requests.recv(), if is_open => match request {
                    Some(request) => waiting.push_back(request),
                    None => is_open = false,
                },
                Some(()) = flushes.next(), if !flushes.is_empty() => {}
                () = tokio::time::sleep_until(next_may_begin), if may_begin_beside => {}
            }
        }
    }

    /// The requests of the next flush, in the order of arrival. Nobody waits any more for a request whose sender has gone.
    fn gather(&self, waiting: &mut VecDeque<Request>) -> Vec<Request> {
        let (mut rows, mut bytes) = (0, 0);
        let mut gathered = Vec::new();
        while let Some(request) = waiting.front() {
            let fits = rows + request.rows.len() <= self.limits.flush_rows_max
                && bytes + request.bytes <= self.limits.flush_bytes_max;
            if !gathered.is_empty() && !fits {
                break;
            }
            let Some(request) = waiting.pop_front() else { break };
            if !request.reply.is_closed() {
                rows += request.rows.len();
                bytes += request.bytes;
                gathered.push(request);
            }
        }
        gathered
    }

    /// Stores the rows of `requests` and answers them. Ends early when nobody waits for an answer any more.
    async fn flush(&self, requests: Vec<Request>) {
        let mut rows = Vec::with_capacity(requests.iter().map(|request| request.rows.len()).sum());
        let mut replies = Vec::with_capacity(requests.len());
        for mut request in requests {
            replies.push((request.rows.len(), request.reply, request._budget));
            rows.append(&mut request.rows);
        }
        if rows.is_empty() {
            return;
        }
        let answers = tokio::select! {
            biased;
            answers = self.store(rows) => answers,
            () = self.nobody_waits(&mut replies) => return,
        };
        let mut answers = answers.into_iter();
        for (count, reply, _budget) in replies {
            // Who has gone will ask again.
            let _ = reply.send(answers.by_ref().take(count).collect());
        }
    }

    async fn nobody_waits(&self, replies: &mut [(usize, oneshot::Sender<Vec<Answered>>, OwnedSemaphorePermit)]) {
        tokio::time::sleep(self.limits.slow_after).await;
        for (_, reply, _) in replies {
            reply.closed().await;
        }
    }

    async fn store(&self, rows: Vec<NewInboxRow>) -> Vec<Answered> {
        let began = Instant::now();
        match self.inbox.admit(&rows).await {
            Ok(answers) => self.answered(rows, answers),
            // Refused as a whole, and there is no whole: it is this row.
            Err(fault) if rows.len() == 1 && fault.class == Class::Refused => {
                self.answered(rows, vec![Admitted::Refused(fault)])
            }
            Err(fault) if rows.len() == 1 || fault.class == Class::NotConnected || began.elapsed() > OUTAGE_AFTER => {
                missed(rows, &fault)
            }
            Err(fault) => {
                tracing::debug!(%fault, rows = rows.len(), "a batch was not stored; its rows are tried one by one");
                self.store_one_by_one(rows).await
            }
        }
    }

    fn answered(&self, rows: Vec<NewInboxRow>, answers: Vec<Admitted>) -> Vec<Answered> {
        let is_due =
            |row: &NewInboxRow| row.consumption == Consumption::Push && row.dead.is_none() && row.delay_us == 0;
        if rows.iter().zip(&answers).any(|(row, answer)| matches!(answer, Admitted::New(_)) && is_due(row)) {
            self.stored.notify_one();
        }
        rows.into_iter().zip(answers).map(|(row, answer)| Answered { row, answer: for_good(answer) }).collect()
    }

    /// Finds the rows that the database does not take and stores the others.
    async fn store_one_by_one(&self, rows: Vec<NewInboxRow>) -> Vec<Answered> {
        let mut answers = Vec::with_capacity(rows.len());
        let mut failed_aggregates: HashSet<(String, String)> = HashSet::new();
        let mut last_fault: Option<Fault> = None;
        let mut failures = 0;
        for row in rows {
            let aggregate = row.aggregate_id.clone().map(|aggregate| (row.source.clone(), aggregate));
            let is_held = aggregate.as_ref().is_some_and(|aggregate| failed_aggregates.contains(aggregate));
            if let Some(fault) = last_fault.clone().filter(|_| is_held || failures >= FAILURES_ALONE_MAX) {
                answers.push(Answered { row, answer: Err(Missed { fault, is_suspect: is_held }) });
                continue;
            }
            let answered = match self.inbox.admit(std::slice::from_ref(&row)).await {
                Ok(answer) => self.answered(vec![row], answer).pop(),
                Err(fault) => Some(Answered { row, answer: for_good(Admitted::Refused(fault)) }),
            };
            let Some(answered) = answered else { continue };
            if let Err(missed) = &answered.answer {
                failures += 1;
                failed_aggregates.extend(aggregate);
                last_fault = Some(missed.fault.clone());
            }
            answers.push(answered);
        }
        answers
    }
}

/// A row is refused for good only by what can never change; a trigger, say, may be taken away again.
fn for_good(answer: Admitted) -> Result<Admitted, Missed> {
    match answer {
        Admitted::Refused(fault) if fault.class != Class::Refused => Err(Missed { fault, is_suspect: true }),
        answer => Ok(answer),
    }
}
