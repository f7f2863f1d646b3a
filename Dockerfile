# syntax=docker/dockerfile:1
# The image of relays and of the operator: one binary on a small Debian, as a user without rights.
#
#   docker build -t queuebox/queuebox .
#
# BUILD_BASE and RUN_BASE may be replaced, for instance by mirrors. RUN_BASE has to be a Debian of the same release as
# BUILD_BASE (glibc, OpenSSL 3), and WITH_PACKAGES=no leaves it as it is, for a base that has the libraries already.
ARG BUILD_BASE=rust:1.95-bookworm
ARG RUN_BASE=debian:bookworm-slim

FROM ${BUILD_BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential cmake pkg-config libssl-dev zlib1g-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# Without the starter of servers for `queuebox bench`: in a container they are named.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --locked --release -p queuebox --no-default-features \
    && install -D -m755 target/release/queuebox /out/queuebox \
    && strip --strip-debug /out/queuebox

FROM ${RUN_BASE}
ARG WITH_PACKAGES=yes
# The Kafka client links the system's OpenSSL and zlib; everything else is inside the binary. The certificates are those
# that a destination is checked against when its manifest names no authority.
RUN if [ "$WITH_PACKAGES" = yes ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends ca-certificates libssl3 zlib1g \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /out/queuebox /usr/local/bin/queuebox
COPY LICENSE /usr/share/doc/queuebox/LICENSE
# A library that is missing shows here and not in a cluster.
RUN ! ldd /usr/local/bin/queuebox | grep "not found"
USER 65532:65532
WORKDIR /var/lib/queuebox
EXPOSE 8080 9090
ENTRYPOINT ["/usr/local/bin/queuebox"]
CMD ["--help"]
