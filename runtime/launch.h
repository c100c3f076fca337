// launch.h - what the launcher says about this process, read from the environment.
//
// Open MPI's mpirun, torchrun, `deepspeed --no_python` and Slurm's srun each start the program once a rank and say in
// variables which rank it is. Nothing here talks to anybody: the answer is a Launch, from which rendezvous.h finds rank 0.
// Looked at in this order, because the later ones are often left over from an outer level (mpirun inside a Slurm job):
//
//     mpirun   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//     RANK     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE or LOCAL_SIZE   (torchrun, deepspeed, by hand)
//     srun     SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, only inside a step (SLURM_STEP_ID)
//
// Rank 0's host is MASTER_ADDR; ranks that are all on one host use 127.0.0.1 instead, so that nothing listens on the
// network for them. Its port is MASTER_PORT. Where no port is said but the launcher names the job, the port is derived from
// that name, and rank 0 takes the first free one of LAUNCH_PORTS; the name goes into `job`, by which a rank recognises
// its own rank 0 among those ports. torchrun's own store already listens on MASTER_PORT: the next ports are taken then.
#pragma once
#include "utils.h"

enum { LAUNCH_PORT = 29500, LAUNCH_PORTS = 16, LAUNCH_WORLD_MAX = 1 << 16, LAUNCH_ADDRESS_BYTES = 256 };

typedef struct {
    const char *launcher;        // "mpirun", "RANK and WORLD_SIZE", "srun"; "" without one
    int rank, world;
    int local_rank, local_world; // among the ranks of this host; -1: the launcher does not say
    char address[LAUNCH_ADDRESS_BYTES]; // where rank 0 listens; a name or a number
    int port, n_ports;           // rank 0 takes the first free one of port .. port + n_ports - 1
    uint64_t job;                // a hash of the job's name; 0 when the launcher has none
} Launch;

// The variable's value, or null when it is not set or empty.
static inline const char *launch_variable(const char *name) {
    const char *value = name ? getenv(name) : NULL;
    return value && value[0] ? value : NULL;
}

// Reads a whole number in [low, high]; false when the variable is not set. Anything else is refused.
static bool launch_int(const char *name, int64_t low, int64_t high, int *value) {
    const char *text = launch_variable(name);
    if (!text) return false;
    int64_t x = 0;
    size_t digits = 0;
    while (text[digits] >= '0' && text[digits] <= '9' && digits < 10) x = 10 * x + (text[digits++] - '0');
    char shown[128];
    if (text[digits] || digits == 0 || x < low || x > high)
        die(EXIT_CONFIG, "environment variable %s = \"%s\": must be a whole number from %" PRId64 " to %" PRId64
            "; unset it or mend the launcher's command", name, text_escape(shown, sizeof shown, text, strlen(text)), low, high);
    *value = (int)x;
    return true;
}

// The first host of Slurm's list: "gpu[07-12,15],cpu3" -> "gpu07". False when the text is no such list.
static bool launch_first_host(const char *list, char *host, size_t room) {
    size_t n = 0;
    for (const char *c = list; *c && *c != ','; c++) {
        if (*c != '[') {
            bool in_name = (*c >= '0' && *c <= '9') || (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || strchr("-._:", *c);
            if (!in_name || n + 1 >= room) return false;
            host[n++] = *c;
            continue;
        }
        size_t digits = 0; // of the first number, leading zeros included
        for (c++; *c >= '0' && *c <= '9'; c++, digits++) {
            if (n + 1 >= room) return false;
            host[n++] = *c;
        }
        while (*c && *c != ']') c++;
        if (!*c || digits == 0) return false;
    }
    host[n] = 0;
    return n > 0;
}

typedef struct {
    const char *launcher, *rank, *world, *local_rank, *local_world[2];
    const char *only_with;  // a variable without which the row does not count
    const char *job_name[2];
} LaunchRow;

static const LaunchRow launch_rows[] = {
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", {"OMPI_COMM_WORLD_LOCAL_SIZE", NULL},
     NULL, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {"RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"},
     NULL, {"TORCHELASTIC_RUN_ID", NULL}},
    // A batch script sees SLURM_NTASKS too, but it is not one of the tasks.
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", {NULL, NULL},
     "SLURM_STEP_ID", {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
};

static void launch_address(Launch *l) {
    const char *address = launch_variable("MASTER_ADDR"), *list = launch_variable("SLURM_STEP_NODELIST");
    bool slurm = strcmp(l->launcher, "srun") == 0;
    char first[LAUNCH_ADDRESS_BYTES];
    if (l->local_world == l->world) address = "127.0.0.1";
    if (!list) list = launch_variable("SLURM_JOB_NODELIST");
    if (!address && slurm && list && launch_first_host(list, first, sizeof first)) address = first;
    if (!address && slurm) address = launch_variable("SLURM_LAUNCH_NODE_IPADDR");
    if (!address)
        die(EXIT_CONFIG, "%d ranks on several hosts, and nothing says where rank 0 is; give its host name: %s", l->world,
            strcmp(l->launcher, "mpirun") == 0 ? "mpirun -x MASTER_ADDR=host" : "MASTER_ADDR=host in the environment");
    if (strlen(address) >= sizeof l->address)
        die(EXIT_CONFIG, "environment variable MASTER_ADDR has %zu characters: no host name is that long", strlen(address));
    memcpy(l->address, address, strlen(address) + 1);
}

static void launch_port(Launch *l, const LaunchRow *row) {
    bool given = launch_int("MASTER_PORT", 1, 65535, &l->port);
    for (int i = 0; i < 2; i++) {
        const char *name = launch_variable(row->job_name[i]);
        if (name) l->job = rng_mix(l->job ^ text_hash(name));
    }
    const char *store = launch_variable("TORCHELASTIC_USE_AGENT_STORE");
    l->n_ports = 1;
    if (given) {
        if (l->job) l->job = rng_mix(l->job ^ (uint64_t)l->port);
        if (store && strcmp(store, "True") == 0 && l->job) { // torchrun's agent itself listens on MASTER_PORT
            l->port = l->port + LAUNCH_PORTS <= 65535 ? l->port + 1 : l->port - LAUNCH_PORTS;
            l->n_ports = LAUNCH_PORTS;
        }
    } else {
        l->port = LAUNCH_PORT;
        if (l->job) { // below 32768, where ports that the system hands out begin
            l->port += LAUNCH_PORTS * (int)(l->job % 200);
            l->n_ports = LAUNCH_PORTS;
        }
    }
}

// One rank, without a launcher; dies when the variables contradict themselves.
static Launch launch_read(void) {
    Launch l;
    memset(&l, 0, sizeof l);
    l.launcher = "";
    l.world = l.local_world = 1;
    for (size_t i = 0; i < sizeof launch_rows / sizeof launch_rows[0]; i++) {
        const LaunchRow *row = &launch_rows[i];
        if (row->only_with && !launch_variable(row->only_with)) continue;
        if (!launch_variable(row->rank) && !launch_variable(row->world)) continue;
        l.launcher = row->launcher;
        bool has_world = launch_int(row->world, 1, LAUNCH_WORLD_MAX, &l.world);
        bool has_rank = launch_int(row->rank, 0, l.world - 1, &l.rank);
        if (l.world == 1 && has_world) return l;
        if (!has_world || !has_rank)
            die(EXIT_CONFIG, "environment variable %s is set and %s is not; set both (or neither, for one rank)",
                has_world ? row->world : row->rank, has_world ? row->rank : row->world);
        l.local_rank = l.local_world = -1;
        int other = 0, hosts = 0;
        if (!launch_int(row->local_world[0], 1, l.world, &l.local_world)) launch_int(row->local_world[1], 1, l.world, &l.local_world);
        if (launch_int("SLURM_STEP_NUM_NODES", 1, LAUNCH_WORLD_MAX, &hosts) && hosts == 1 && row->only_with) l.local_world = l.world;
        launch_int(row->local_rank, 0, (l.local_world > 0 ? l.local_world : l.world) - 1, &l.local_rank);
        if (i == 0 && launch_int("LOCAL_RANK", 0, LAUNCH_WORLD_MAX, &other) && other != l.local_rank)
            die(EXIT_CONFIG, "LOCAL_RANK = %d, and mpirun says %s = %d; unset LOCAL_RANK", other, row->local_rank, l.local_rank);
        launch_address(&l);
        launch_port(&l, row);
        return l;
    }
    return l;
}
