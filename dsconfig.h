// dsconfig.h - the configuration: structs that mirror the JSON file, the table of all keys, reading and checking.
#pragma once
#include "runtime/tensor.h"

#define CONFIG_PATH_MAX 4096
#define CONFIG_NAME_MAX 128

typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_LION, OPTIMIZER_SGD } OptimizerType; // "Adam" is ADAMW with adam_w_mode
typedef enum {
    SCHEDULE_CONSTANT, SCHEDULE_WARMUP_LR, SCHEDULE_WARMUP_DECAY_LR, SCHEDULE_WARMUP_COSINE_LR,
    SCHEDULE_ONE_CYCLE, SCHEDULE_LR_RANGE_TEST, SCHEDULE_COSINE, // the last one is train_gpt.run.lr_schedule
} ScheduleType;

// A field has the name of its key; a section's prefix is the struct's name.
typedef struct {
    int64_t train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps; // solved by the batch triangle
    bool dataloader_drop_last;
    int64_t vocabulary_size; // 0 = not given
} BatchConfig;

typedef struct {
    char preset[CONFIG_NAME_MAX];    // "" = none
    char init_from[CONFIG_PATH_MAX]; // "" = random weights; a Hugging Face folder or an llm.c model .bin
    int64_t n_layer, n_head, n_embd, n_positions, vocab_size, n_inner; // 0 = not given (resolved from preset, else init_from)
    double layer_norm_epsilon;
    bool tie_word_embeddings;
} ModelConfig;

typedef struct {
    OptimizerType type;
    double lr, betas[2], eps, weight_decay;
    bool bias_correction, adam_w_mode; // adam_w_mode is true unless type Adam says false
    double momentum, dampening;
    bool nesterov;
} OptimizerConfig;

typedef struct {
    ScheduleType type;
    double warmup_min_lr, warmup_max_lr;
    int64_t warmup_num_steps, total_num_steps;
    bool warmup_log; // warmup_type: log or linear
    double warmup_min_ratio, cos_min_ratio;
    double lr_range_test_min_lr, lr_range_test_step_rate;
    int64_t lr_range_test_step_size;
    bool lr_range_test_staircase;
    double cycle_min_lr, cycle_max_lr, decay_lr_rate, cycle_min_mom, cycle_max_mom, decay_mom_rate;
    int64_t cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count, decay_step_size;
    bool cycle_momentum;
    int64_t last_batch_iteration;
    // train_gpt.run.lr_schedule = cosine
    int64_t warmup_steps, total_steps;
    double final_lr_frac;
} SchedulerConfig;

typedef struct {
    bool enabled;
    double loss_scale; // 0 = dynamic
    int64_t initial_scale_power, loss_scale_window, hysteresis;
    bool consecutive_hysteresis;
    double min_loss_scale;
} Fp16Config;

typedef struct {
    bool enabled, check_grad_overflow;
} Bf16Config;

typedef enum { OFFLOAD_NONE, OFFLOAD_CPU, OFFLOAD_NVME } OffloadDevice;

typedef struct {
    OffloadDevice device;
    char nvme_path[CONFIG_PATH_MAX];
    int64_t buffer_count, buffer_size, max_in_cpu; // the last two of parameters only, in elements
    bool pin_memory, pipeline_read, pipeline_write; // the last two of the optimizer only
} OffloadConfig;

typedef struct {
    int64_t stage;
    int64_t timeout; // seconds
    bool reduce_scatter, overlap_comm, load_from_fp32_weights, gather_16bit_weights_on_model_save;
    int64_t reduce_bucket_size, allgather_bucket_size, sub_group_size; // elements, as the next two lines
    int64_t prefetch_bucket_size, param_persistence_threshold, model_persistence_threshold;
    int64_t max_live_parameters, max_reuse_distance;
    OffloadConfig offload_param, offload_optimizer;
} ZeroConfig;

typedef enum { PIPELINE_1F1B, PIPELINE_GPIPE, PIPELINE_INTERLEAVED } PipelineSchedule;

typedef struct {
    int64_t tensor, pipeline, sequence, data; // degrees; their product is the number of ranks
    PipelineSchedule pipeline_schedule;
    int64_t virtual_pipeline;                 // model chunks a stage; 1 unless Interleaved
} ParallelConfig;

typedef struct {
    char train[CONFIG_PATH_MAX], val[CONFIG_PATH_MAX]; // glob of shards, or a text file; "" = none
    bool shuffle;
    char tokenizer[CONFIG_PATH_MAX];
} DataConfig;

typedef struct {
    int64_t steps, seq_len, seed; // seq_len 0 = the model's n_positions
    char output_dir[CONFIG_PATH_MAX];
    int64_t eval_every, eval_batches, sample_every, sample_tokens; // 0 = never
    char sample_prompt[CONFIG_PATH_MAX];
    int64_t checkpoint_every; // 0 = only at the end
    char resume[CONFIG_NAME_MAX]; // "auto", "none" or a tag
    bool deterministic;
} RunConfig;

typedef struct {
    char save_dir[CONFIG_PATH_MAX];  // "" = <output_dir>/checkpoints
    char load_path[CONFIG_PATH_MAX]; // "" = save_dir
    int64_t keep_n_most_recent, num_checkpoints_to_keep; // 0 = no limit
} CheckpointConfig;

typedef struct {
    BatchConfig batch;
    ModelConfig model;
    OptimizerConfig optimizer;
    SchedulerConfig scheduler;
    double gradient_clipping; // 0 = off
    Fp16Config fp16;
    Bf16Config bf16;
    DType dtype; // what fp16 and bf16 say: the type of weights, activations and their gradients
    ZeroConfig zero;
    ParallelConfig parallel;
    DataConfig data;
    RunConfig run;
    CheckpointConfig checkpoint;
    int64_t steps_per_print;
    bool wall_clock_breakdown;
    // Command line
    char file[CONFIG_PATH_MAX];
    bool generate;                          // --generate "PROMPT"
    char generate_prompt[CONFIG_PATH_MAX];
    char export_dir[CONFIG_PATH_MAX];       // --export DIR, "" = no
    char load_dir[CONFIG_PATH_MAX];         // --load_dir DIR, "" = checkpoint.load_path, else where this run saves
    char load_tag[CONFIG_NAME_MAX];         // --load_tag TAG, "" = newest
    int64_t world, local_rank;              // ranks of this job, and this one's number on its host
} Config;

// Reads the command line, the file that it names and its overrides. Lists every problem on stderr and ends with
// EXIT_CONFIG when there is one. --help, --version, --help-config and --check-config print and end with 0. The result
// is never null and belongs to the caller (free it).
static Config *config_load(int argc, char **argv);
